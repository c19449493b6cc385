"""What follows when workers exit: root causes, outcomes and the restart policy. Starts no process."""
