"""Methods side by side on the same removals, timed alike."""
