"""Files that outlive a process: paths on disks and in buckets, locks, checkpoints, and checksums of their content."""
