"""The processes of one host: workers, their output and heartbeats, and the supervisor that starts and ends them."""
