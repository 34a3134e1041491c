"""Plans and schedules as versioned JSON files, read back strictly."""
