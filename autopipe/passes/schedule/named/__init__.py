"""Published schedules by name, one a file."""
