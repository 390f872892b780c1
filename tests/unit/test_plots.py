"""The printed picture of trajectories: its legend speaks of the models that were saved."""

from matplotlib import pyplot as plt

from hamu.report.pictures import draw_trajectories

PATHS = {
    "ft": [(0.0, 0.0), (0.2, 0.1)],
    "kl": [(0.0, 0.0), (0.1, 0.2)],
    "ga": [(0.0, 0.0), (-0.1, 0.3), (-9.0, 60.0)],
}


def drawn(ends=None):
    figure, axes = plt.subplots()
    draw_trajectories(axes, list(PATHS.items()), "title", ends=ends)
    lines = {line.get_label(): line for line in axes.get_lines()}
    rings = [
        line.get_xydata().tolist()
        for line in axes.get_lines()
        if line.get_markerfacecolor() == "none"
    ]
    plt.close(figure)
    return list(lines), rings


def test_the_legend_says_where_a_run_ended_that_is_cut():
    labels, rings = drawn()
    assert "ga (ends at -9, 60)" in labels
    assert rings == []


def test_a_model_saved_earlier_is_ringed_and_not_said_to_be_far_off():
    labels, rings = drawn([PATHS["ft"][-1], PATHS["kl"][-1], PATHS["ga"][1]])
    assert {"ft", "kl", "ga", "the model saved"} <= set(labels)
    assert rings == [[[-0.1, 0.3]], []], "one in the picture, one for the legend"
