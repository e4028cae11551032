"""For the files of a study: tensors and tables in a run directory, and what is in other runs."""

from __future__ import annotations

from hookrun.store.captures.read import Leaf as Leaf  # what a hook captured at a module
from hookrun.store.captures.read import SampleTable as SampleTable  # the names of the samples of a run
from hookrun.store.captures.read import (
    StoredCapture as StoredCapture,  # a captured tensor, read when it is indexed
)
from hookrun.store.captures.read import captured_tensors as captured_tensors  # all captured tensors of a run
from hookrun.store.captures.tensor_file import (
    open_tensors as open_tensors,  # a file of tensors, to read some of them
)
from hookrun.store.captures.tensor_file import read_tensor as read_tensor  # one of its tensors
from hookrun.store.captures.tensor_file import (
    read_tensors as read_tensors,  # all of its tensors, and its texts
)
from hookrun.store.captures.tensor_file import write_tensors as write_tensors  # write such a file
from hookrun.store.config.yaml_files import load_plain as load_plain  # a YAML file as lists and mappings
from hookrun.store.files import StoreError as StoreError  # something in a directory is missing or damaged
from hookrun.store.files import replacing as replacing  # write a file that appears when it is complete
from hookrun.store.files import write_table as write_table  # write a CSV file
from hookrun.store.format import CHECKPOINTS as CHECKPOINTS  # the folder of checkpoints
from hookrun.store.format import FIRING as FIRING  # the number of the sample of a row that is a whole firing
from hookrun.store.format import decode as decode  # JSON that may hold NaN -> values
from hookrun.store.format import differences as differences  # where nested mappings differ
from hookrun.store.format import encode as encode  # values -> JSON that may hold NaN
from hookrun.store.reader import Run as Run  # a run directory
from hookrun.store.run_dir import RunDir as RunDir  # the directory of the open run
from hookrun.store.scores import ABOUT as ABOUT  # keys of a line of metrics that are not metrics
from hookrun.store.scores import OF_PARTS as OF_PARTS  # such keys of lines about parts of a model
from hookrun.store.scores import is_batch as is_batch  # whether a line of metrics is of one batch
from hookrun.store.scores import is_part as is_part  # whether it is of one position or sample
