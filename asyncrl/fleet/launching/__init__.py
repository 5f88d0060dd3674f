"""Starting workers: as tasks of this process, or on hosts that join; and what workers leave behind."""
