"""What evaluation, analysis and training share about a loaded model: how it is read, scored and recorded."""
