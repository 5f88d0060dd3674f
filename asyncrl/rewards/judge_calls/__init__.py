"""Calls of judges, language models behind a URL: limits, tries, the score in a reply, scores known already."""
