"""How a command that was broken off ends."""

import hamu.cli
from hamu.cli import main


def test_ctrl_c_ends_a_command_with_130_and_one_line(monkeypatch, capsys):
    def broken_off(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(hamu.cli, "_methods", broken_off)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "hamu methods: interrupted\n"
