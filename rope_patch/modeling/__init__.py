"""What every engine shares about a loaded model."""
