"""Small runs, each in a folder of its own."""

from small_runs import (  # noqa: F401
    _in_a_folder_of_its_own,
    executed,
    fails,
    hook,
    no_data_is_read,
    own_model,
    performed,
    ready,
    refused,
    run,
    shared,
    trusted,
)
