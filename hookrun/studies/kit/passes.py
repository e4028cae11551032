"""For what a study computes: data, the model and its calls, batches under hooks, metrics, captures of other runs."""

from __future__ import annotations

from hookrun import data as data  # the data sets
from hookrun.data import DataInfo as DataInfo  # what is known of the data before it is read
from hookrun.data import Split as Split  # train, val or test
from hookrun.data import TensorInfo as TensorInfo  # shape and dtype of an input
from hookrun.data.info import SPLITS as SPLITS  # the names of the splits in the order of their numbers
from hookrun.data.samples import IGNORED as IGNORED  # the label of what has no label
from hookrun.data.source import checked_file as checked_file  # a file of the user with a usual suffix
from hookrun.data.text_files import lines as lines  # the lines of a text file, with their numbers
from hookrun.data.tokenizer import FromFolder as FromFolder  # a tokenizer of a folder
from hookrun.models.arguments import positions_of as positions_of  # how many positions a model of tokens has
from hookrun.models.decoder import (
    FromHeads as FromHeads,  # the output projection of an attention, which knows its heads
)
from hookrun.models.decoder import SumOfTwo as SumOfTwo  # a module that adds two streams
from hookrun.models.weights import read_weights as read_weights  # the tensors of a file of weights
from hookrun.run.experiment.metrics.metrics import LOSS as LOSS  # the name of the metric that is the loss
from hookrun.run.experiment.metrics.metrics import (
    PERPLEXITY as PERPLEXITY,  # the name of the metric that is its exponential
)
from hookrun.run.experiment.metrics.metrics import kl as kl  # the KL divergence of each row
from hookrun.run.experiment.metrics.metrics import row_values as row_values  # each metric of each row
from hookrun.run.experiment.metrics.predictions import (
    predicted_rows as predicted_rows,  # the outputs that another run has written
)
from hookrun.run.experiment.metrics.problems import (
    token_problems as token_problems,  # why tokens cannot be read in the data
)
from hookrun.run.experiment.metrics.problems import (
    too_many_rows as too_many_rows,  # why a metric over the split would keep too many rows
)
from hookrun.run.experiment.metrics.rows import (
    BatchRows as BatchRows,  # the rows of a batch that a metric is computed from
)
from hookrun.run.experiment.metrics.rows import RowPart as RowPart  # some of these rows
from hookrun.run.experiment.metrics.rows import (
    main_tensor as main_tensor,  # the scores in the output of a model
)
from hookrun.run.experiment.metrics.rows import (
    own_token_scores as own_token_scores,  # the scores for tokens in it, or None
)
from hookrun.run.experiment.observers import new_nodes as new_nodes  # the autograd nodes behind a value
from hookrun.run.experiment.prepared import EXAMPLE_BATCH as EXAMPLE_BATCH  # how many samples an example has
from hookrun.run.experiment.prepared import (
    Prepared as Prepared,  # an experiment with all that was built for it
)
from hookrun.run.experiment.prepared import as_call as as_call  # a batch as the arguments of the model
from hookrun.run.experiment.proving import (
    structure as structure,  # hooks without the numbers that do not matter for a trial
)
from hookrun.run.experiment.run_values import (
    RunValues as RunValues,  # the other runs that an experiment names
)
from hookrun.run.experiment.sample_checks import missing_spans as missing_spans  # why samples lack a span
from hookrun.run.experiment.sample_checks import row_problems as row_problems  # why values lack samples
from hookrun.run.experiment.session import (
    generator_states as generator_states,  # the states of the random generators
)
from hookrun.run.experiment.session import set_generators as set_generators  # set them again
from hookrun.run.passes.backward_pass import Scoring as Scoring  # the score of each sample, from the output
from hookrun.run.passes.batches import (
    Batch as Batch,  # a batch on the device, with the numbers of its samples
)
from hookrun.run.passes.batches import Batches as Batches  # the batches of a split
from hookrun.run.passes.batches import (
    BatchesOfSplits as BatchesOfSplits,  # the batches of several splits, one after the other
)
from hookrun.run.passes.context import (
    RunContext as RunContext,  # an open run: forward, log, records, saved states
)
from hookrun.run.passes.measuring import Measuring as Measuring  # the rows of a batch, and sums over batches
from hookrun.run.passes.measuring import (
    choose_tokens as choose_tokens,  # the tokens of a batch that a clause names
)
from hookrun.run.passes.progress import Screen as Screen  # what a run prints
from hookrun.run.passes.resuming import (
    Results as Results,  # results of an analysis that are kept if it is cut off
)
from hookrun.run.tasks.captured.cka import Way as Way  # how the similarity of many captures is computed
from hookrun.run.tasks.captured.cka import chosen_way as chosen_way  # the one that needs the least memory
from hookrun.run.tasks.captured.cka import linear_cka as linear_cka  # the similarity of two captures
from hookrun.run.tasks.captured.cka import (
    linear_cka_of_all as linear_cka_of_all,  # the similarity of each two captures
)
from hookrun.run.tasks.captured.features import BYTES as BYTES  # the bytes of a number in an analysis
from hookrun.run.tasks.captured.features import Features as Features  # the rows of a capture as vectors
from hookrun.run.tasks.captured.features import gram as gram  # the products of each two rows
from hookrun.run.tasks.captured.features import (
    reading_bytes as reading_bytes,  # the memory that reading rows takes
)
from hookrun.run.tasks.captured.input import (
    Analysis as Analysis,  # a run and its captures that a task analyses
)
from hookrun.run.tasks.captured.input import (
    TwoRuns as TwoRuns,  # two runs, or the jobs of two sweeps in pairs
)
from hookrun.run.tasks.captured.input import find_both as find_both  # open them
from hookrun.run.tasks.captured.input import (
    projection_entry as projection_entry,  # what a line says of a projection
)
from hookrun.run.tasks.captured.input import show_table as show_table  # print a table
from hookrun.run.training.finite import not_finite as not_finite  # NaN or infinity in words, or nothing
from hookrun.store.states.files import SECONDS as SECONDS  # how often a state is saved
