"""Programs that ask another engine for its rotary tables, in that engine's own Python; they import nothing of ours."""
