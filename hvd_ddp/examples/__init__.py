"""Programs to copy. Each says at its top how it is started."""
