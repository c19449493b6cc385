"""What follows when workers exit: root causes, outcomes, the restart policy and its timeouts. Starts no process."""
