"""Random inputs for the command line, and what must hold whatever the input is."""

from hypothesis import strategies as st

from fuzzing.data import with_data
from fuzzing.inputs import Input
from fuzzing.models import with_checkpoint, with_model, with_record
from fuzzing.settings import with_config, with_flags, with_rows, with_words
from fuzzing.world import World

__all__ = ["INPUTS", "Input", "World"]

_OFTEN = [with_flags, with_config, with_data, with_model]
_KINDS = [*_OFTEN, *_OFTEN, with_rows, with_checkpoint, with_record, with_words]
INPUTS = st.integers(0, len(_KINDS) - 1).flatmap(lambda number: _KINDS[number]())
