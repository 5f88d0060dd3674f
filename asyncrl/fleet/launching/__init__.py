"""Starting workers: as tasks of this process, and what they leave behind."""
