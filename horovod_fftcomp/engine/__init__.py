"""The steps of one rank: state, buckets, order of rounds."""
