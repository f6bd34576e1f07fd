"""What other engines read: folders and files that carry a patched table."""
