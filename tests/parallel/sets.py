"""Process sets of two and of one of three ranks, whatever the framework."""

from __future__ import annotations

from horovod.common import process_sets

MEMBERS = {"pair": [0, 2], "rest": [1]}


def sets_of_job():
    """Return the two sets; Horovod has one set of the same ranks, which other cases may have."""
    known = process_sets._basics._get_process_set_ids_and_ranks().items()
    found = {name: process_sets.ProcessSet(ranks) for name, ranks in MEMBERS.items()}
    for name, ranks in MEMBERS.items():
        number = next((number for number, have in known if have == ranks), None)
        if number is None:
            process_sets.add_process_set(found[name])
        else:
            found[name].process_set_id = number
    return found
