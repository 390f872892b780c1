"""A command that runs others is told to end while one of them is at a chosen step."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch

from hamu.unlearning.trainer.logs import ProgressBar

_PATIENCE = 120  # seconds
FORKS = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="its runs are forks, which cannot use a GPU; CUDA_VISIBLE_DEVICES= runs it",
)


@contextmanager
def at_step(step, act, is_meant=lambda args: True):
    """Lets runs that are meant do something whenever they end this step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step and is_meant(args):
            act()
        original(self, args, state, control, **kwargs)

    original = ProgressBar.on_step_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressBar, "on_step_end", on_step_end)
        yield patch


def interrupted_at(run, step):
    """Sends the command SIGTERM when the run in this folder is at this step; the run waits until it is passed on."""

    def interrupt():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.kill(os.getppid(), signal.SIGTERM)
        assert signal.sigtimedwait({signal.SIGTERM}, _PATIENCE), "it was not passed on"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    return at_step(step, interrupt, lambda args: args.output_dir.endswith(run))
