"""Wire format of payloads: header, positions, entropy code, packed integers, random numbers."""

# ruff: noqa: F401 (the names of the header that other folders use)

from horovod_fftcomp.wire.header import (
    DTYPES,
    FLAGS_OFFSET,
    MAGIC,
    SCALE_OFFSET,
    VERSION,
    Header,
    Plan,
    align,
    dense_plan,
    fnv1a,
    make_plan,
    mark_corrupt,
    raw_plan,
    read_header,
    split_payloads,
    write_header,
)
