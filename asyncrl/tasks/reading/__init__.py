"""Reads rows of files and data sets, and says what is wrong with them."""
