"""The model folders that from_pretrained loads: finds, downloads or makes them, and checks their files."""
