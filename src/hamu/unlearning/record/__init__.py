"""The record of a run: what was forgotten, how, and to what effect; its checks; model cards."""
