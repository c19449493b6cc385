"""Training by workers whose variables live on servers: what the chief schedules, and what workers push."""
