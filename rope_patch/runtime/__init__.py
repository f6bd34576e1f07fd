"""What long commands need of the machine: files, finished work, progress, processes, and what users write."""
