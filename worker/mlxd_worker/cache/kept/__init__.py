"""What is kept of rows beyond their next write: snapshots, and when they are taken."""
