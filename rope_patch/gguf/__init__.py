"""GGUF files: reading and writing them, the rotary table that they hold, and its patch."""
