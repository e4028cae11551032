"""For the `records.py` of a study: records with checked keys, and reading them. Imports no torch."""

from __future__ import annotations

from hookrun.engine import html as html  # tables in notebooks
from hookrun.store.records import MOST_COUNT as MOST_COUNT  # the largest count
from hookrun.store.records import Count as Count  # an integer from 0
from hookrun.store.records import Listing as Listing  # a list, of which only the first mistake is told
from hookrun.store.records import Name as Name  # a short text
from hookrun.store.records import OfSample as OfSample  # a line about one sample
from hookrun.store.records import Record as Record  # a mapping with checked keys
from hookrun.store.records import Text as Text  # a long text
from hookrun.store.records import TokenScore as TokenScore  # a token with its text and probability
from hookrun.store.records import each_record as each_record  # the lines of a file, checked, one by one
from hookrun.store.records import grouped as grouped  # items by a key
from hookrun.store.records import read_records as read_records  # the lines of a file, checked
from hookrun.store.records import typed_record as typed_record  # a JSON file, checked
from hookrun.store.studies import ask_report as ask_report  # what the report draws of a run
from hookrun.store.studies import (
    functions_of_studies as functions_of_studies,  # the functions of a name that studies have
)
