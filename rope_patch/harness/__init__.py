"""The plug-in for the language model evaluation harness."""
