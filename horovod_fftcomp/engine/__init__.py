"""Engine: runs the exchanges of one rank, with its buckets, state and schedules."""
