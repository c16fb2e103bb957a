"""What several passes share. The scan for passes skips this folder."""
