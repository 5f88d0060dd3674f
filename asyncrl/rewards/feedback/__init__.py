"""Live feedback: answers that wait for a person, the ratings on disk, and the page where they are given."""
