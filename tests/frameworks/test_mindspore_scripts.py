"""Scripts as users write them, in plain Python on the real MindSpore: what of them is protected, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.testing.jobs import Finished
from support.mindspore import place
from support.mindspore.job import Job

SCRIPT = Path(place.__file__).parent / "trainings_child.py"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(place.missing()), reason=place.missing())]


def job(folder: Path, case: str, fails: str = "") -> Job:
    return Job(folder=folder, ranks=1, script=SCRIPT, arguments=[case, str(folder), *([fails] if fails else [])])


def run(folder: Path, case: str, fails: str = "") -> Finished:
    return job(folder, case, fails).run(timeout=120)


def test_the_one_line_of_the_documentation_protects(tmp_path: Path) -> None:
    broken = run(tmp_path, "inline", "raises")
    assert broken.returncode != 0 and "NOT protected" not in broken.output, broken.output
    finished = run(tmp_path, "inline")
    assert finished.returncode == 0, finished.output
    assert job(tmp_path, "inline").steps(0) == [[1, 2, 3, 4, 5, 6], [7, 8]], finished.output
    assert "nothing of this process is protected" not in broken.output + finished.output


def test_a_training_that_the_hooks_did_not_see_says_so(tmp_path: Path) -> None:
    finished = run(tmp_path, "late")
    assert finished.returncode == 0, finished.output
    assert finished.output.count("this training is NOT protected") == 1, finished.output


def test_a_users_first_epoch_is_known_to_a_resume(tmp_path: Path) -> None:
    assert run(tmp_path, "later", "raises").returncode != 0
    finished = run(tmp_path, "later")
    assert finished.returncode == 0, finished.output
    assert job(tmp_path, "later").steps(0) == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], finished.output


def test_a_users_first_epoch_with_a_sink_size_is_known_too(tmp_path: Path) -> None:
    assert run(tmp_path, "sinks", "raises").returncode != 0
    finished = run(tmp_path, "sinks")
    assert finished.returncode == 0, finished.output
    assert job(tmp_path, "sinks").steps(0) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]], finished.output


def test_what_callbacks_have_left_is_not_loaded_over_a_resume(tmp_path: Path) -> None:
    assert run(tmp_path, "leaves", "raises").returncode != 0
    finished = run(tmp_path, "leaves")
    assert finished.returncode == 0, finished.output
    assert job(tmp_path, "leaves").steps(0) == [[1, 2, 3, 4, 5, 6], [7, 8]], finished.output
    for file in ("net_train.ckpt", "backup.ckpt"):
        assert f"{file} over step 6" in finished.output


def test_behind_a_resume_others_read_all_of_the_training_data(tmp_path: Path) -> None:
    assert run(tmp_path, "reads", "raises").returncode != 0
    finished = run(tmp_path, "reads")
    assert finished.returncode == 0, finished.output
    assert job(tmp_path, "reads").steps(0) == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], finished.output
    assert finished.output.count("read 4") == 2


def test_mindformers_log_in_a_script_does_not_hide_what_can_be_resumed(tmp_path: Path) -> None:
    assert run(tmp_path, "logs", "raises").returncode != 0
    finished = run(tmp_path, "logs")
    assert finished.returncode == 0, finished.output
    assert job(tmp_path, "logs").steps(0) == [[1, 2, 3, 4, 5, 6], [7, 8]], finished.output


def test_what_callbacks_change_and_draw_continues_unchanged(tmp_path: Path) -> None:
    """One fault where an epoch begins, one inside of it, where callbacks see its begin once more."""
    finals = []
    for name, faults in (("reference", "0"), ("faulty", "570")):
        folder = tmp_path / name
        folder.mkdir()
        outputs = []
        for fails in faults:
            finished = run(folder, "changes", fails)
            assert (finished.returncode == 0) == (fails == "0"), finished.output
            outputs.append(finished.output)
        finals.append([line for line in outputs[-1].splitlines() if line.startswith("final ")])
    assert finals[0] == finals[1] and len(finals[0]) == 8, outputs
    noted = "changed learning_rate: kept as saved"
    assert [noted in output for output in outputs] == [False, False, True], outputs


def test_a_start_with_fewer_epochs_than_the_one_before_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, "left").returncode != 0
    finished = run(tmp_path, "left", "3")
    assert finished.returncode == 0, finished.output
    assert "to train 6 epochs in all, and is to train 3 now" in finished.output and "nothing left" in finished.output


def test_where_checkpointmonitor_in_a_script_is_not_resumed_is_said(tmp_path: Path) -> None:
    broken = run(tmp_path, "monitored", "raises")
    assert broken.returncode != 0 and "from scratch beside" not in broken.output, broken.output
    finished = run(tmp_path, "monitored")
    assert finished.returncode == 0, finished.output
    assert "training begins from scratch beside 2 checkpoints" in finished.output, finished.output


def test_exported_weights_are_no_checkpoints_of_the_training(tmp_path: Path) -> None:
    assert run(tmp_path, "exports", "kill").returncode != 0, "nothing but an export is there"
    assert run(tmp_path, "exports", "early").returncode != 0, "a save after a fault"
    assert run(tmp_path, "exports", "kill").returncode != 0, "a newer export"
    before = {path.name for path in (tmp_path / "ckpts").glob("net*.ckpt")}
    finished = run(tmp_path, "exports")
    assert finished.returncode == 0, finished.output
    steps = [[1, 2, 3, 4, 5], [1, 2], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8]]
    assert job(tmp_path, "exports").steps(0) == steps, finished.output
    assert before <= {path.name for path in (tmp_path / "ckpts").iterdir()}
    assert not list((tmp_path / "ckpts").glob("*.unfit*")) and not list((tmp_path / "ckpts").glob("net*.manifest.json"))
    assert finished.output.count("saved_network, remove_redundancy or enc_key") == 1


@pytest.mark.parametrize("second", ["with", "without"])
def test_a_later_trainings_files_are_not_those_of_the_first(tmp_path: Path, second: str) -> None:
    for _ in range(2):
        finished = run(tmp_path, "folds", second)
        assert finished.returncode == 0, finished.output
    later = [1, 2, 3, 4, 5, 6, 7, 8]
    assert job(tmp_path, "folds").steps(0) == [[1, 2, 3, 4, *later], later], finished.output


def test_data_that_are_shuffled_without_a_seed_are_named(tmp_path: Path) -> None:
    broken, finished = run(tmp_path, "unseeded", "raises"), run(tmp_path, "unseeded")
    for each in (broken, finished):
        assert each.output.count("shuffled without a seed") == 1, each.output
    assert finished.returncode == 0 and "random augmentations" not in finished.output


def test_what_a_resume_does_not_repeat_is_known_of_each_pipeline(tmp_path: Path) -> None:
    finished = run(tmp_path, "pipelines")
    assert finished.returncode == 0, finished.output
    seedless = ("rows", "drawn rows", "shard", "second is shuffled")
    augmented = ("flips", "composed", "sometimes", "augmented", "uniform")
    plain = ("generator", "rows in order", "shard in order", "own order", "resized")
    told = dict.fromkeys(seedless, " or a seed") | dict.fromkeys(augmented, "augmentations or ")
    told |= dict.fromkeys(plain, " or ") | {"own sampler": "own sampler or own sampler"}
    lines = (line.split(": ", 1) for line in finished.output.splitlines())
    assert {one: what for one, *what in lines if one in told} == {name: [what] for name, what in told.items()}
