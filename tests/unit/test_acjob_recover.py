"""How options of Megatron's are found in a job's YAML."""

from __future__ import annotations

import pytest

from lastgasp.jobs.acjob.recover import _COMMENT, _MEGATRON, NOT_FEWER


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--tensor-model-parallel-size 8", True),
        ("--tensor-model-parallel-size\t8", True),
        ("--tensor-model-parallel-size \\\n  8", True),
        ("--tensor-model-parallel-size='8'", True),
        ('--dataloader-type "cyclic"', True),
        ('--dataloader-type "single"', False),
        ("--dataloader-type single-x", True),
        ("--num-experts 4", True),
        ("--num-experts-x 4", False),
        ("--tensor-model-parallel-size 1", False),
        ("--tensor-model-parallel-size ${TP}", False),
        ("python x.py\n  # --num-experts 4\n", False),
    ],
)
def test_an_option_is_found_however_the_shell_has_it(words: str, found: bool) -> None:
    assert bool(NOT_FEWER.search(_COMMENT.sub("", words))) == found


@pytest.mark.parametrize(
    ("words", "found"),
    [("--framework megatron", True), ("--framework='megatron'", True), ("--framework megatron-x", False)],
)
def test_the_framework_is_found(words: str, found: bool) -> None:
    assert bool(_MEGATRON.search(words)) == found
