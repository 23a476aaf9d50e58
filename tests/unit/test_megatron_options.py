"""Options of the Megatron plugin: the parser's group, the environment, what is refused, and the table of its page."""

from __future__ import annotations

import os
import re
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

import torch.distributed

from lastgasp.errors import ConfigError
from lastgasp.options import Options
from lastgasp.steps import bits
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place
from lastgasp_megatron.args import add_options, around_parse_args, options_of
from lastgasp_megatron.hooks import Training
from lastgasp_megatron.installation import Installation
from lastgasp_megatron.lead import leads_itself, take_the_lead
from lastgasp_megatron.ranks import untried
from lastgasp_megatron.run import Run
from lastgasp_megatron.settings import not_known, refuse, users_handler

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "plugins/megatron/README.md", ROOT / "docs/megatron.md"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LASTGASP_")]:
        monkeypatch.delenv(name)


def parsed(*arguments: str) -> Options:
    parser = add_options(add_options(ArgumentParser()))
    parser.add_argument("--save", default="ckpts")
    return options_of(parser.parse_args(arguments))


def test_defaults() -> None:
    options = parsed()
    assert options.gasp.directory == Path("ckpts").absolute()
    assert (options.gasp.keep, options.gasp.resume, options.require_manifest) == (3, "auto", False)
    assert options.marks == MarksConfig()


def test_an_option_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KEEP": "7", "MARKS": "all", "REQUIRE_MANIFEST": "1", "DIR": "elsewhere"}.items():
        monkeypatch.setenv(f"LASTGASP_{name}", value)
    assert parsed().gasp.keep == 7 and parsed().marks.mask == bits.ALL and parsed().require_manifest
    assert parsed().gasp.directory == Path("elsewhere").absolute()
    options = parsed("--lastgasp-keep", "2", "--lastgasp-marks", "step,comm", "--lastgasp-dir", "here")
    assert (options.gasp.keep, options.marks.mask) == (2, bits.STEP | bits.COMM)
    assert options.gasp.directory == Path("here").absolute()


def test_marks() -> None:
    options = parsed("--lastgasp-marks", "0", "--lastgasp-profiling-dir", "rows", "--lastgasp-profiling-limit-mb", "9")
    assert options.marks == MarksConfig(mask=None, directory=Path("rows").absolute(), limit_mb=9)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--lastgasp-keep", "0"), ("--lastgasp-marks", "steps"), ("--lastgasp-profiling-limit-mb", "many")],
)
def test_a_wrong_value_is_refused_with_its_name(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=option.removeprefix("--lastgasp-").replace("-", "_")):
        parsed(option, value)


def test_no_directory_to_save_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="--save"):
        options_of(Namespace(save=None, load="of others"))


def test_a_trial_that_saves_nothing_is_left_alone_and_nothing_is_written_where_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """--load may be a directory of others, who would start from the trial's last step."""
    monkeypatch.delenv("RANK", raising=False)
    args = Namespace(save=None, load=str(tmp_path))
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: args))
    training = Training(lambda: None)
    assert training._around_setup(lambda *given: given, (1, 2), {}) == (1, 2)
    assert training._run is None and not list(tmp_path.iterdir()) and "--lastgasp-dir" in caplog.text


def test_a_version_without_a_provider_is_called_as_it_is() -> None:
    assert around_parse_args(lambda known: known, (3,), {}) == 3


@pytest.mark.parametrize(
    ("option", "args"),
    [
        ("--non-persistent-ckpt-type", {"non_persistent_ckpt_type": "global"}),
        ("--ckpt-format", {"ckpt_format": "zarr"}),
        ("--qk-clip", {"qk_clip": True}),
        ("--vision-pretraining-type", {"vision_pretraining": True, "vision_pretraining_type": "dino"}),
        ("--async-save", {"ckpt_format": "torch", "async_save": True}),
        ("--logits-save-dir", {"ckpt_format": "torch_dist", "async_save": True, "logits_save_dir": "logits"}),
        ("torch.distributed", {}),
    ],
)
def test_what_is_refused(option: str, args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(option)):
        refuse(Namespace(**args))


def test_what_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    off: dict[str, Any] = {"num_experts": None, "qk_clip": False, "vision_pretraining_type": "dino"}
    off |= {"lora_target_modules": [], "reuse_fp32_param": False}
    for args in ({}, off, {"ckpt_format": "torch_dist", "async_save": True}, {"ckpt_format": "torch"}):
        refuse(Namespace(**args))


def test_the_operators_strategies_are_lastgasps_unless_the_user_gave_mindspeeds_flag() -> None:
    """MindSpeed-LLM 2.2 turns HIGH_AVAILABILITY into its own flag, and its adapter would lead beside lastgasp."""
    env = {"HIGH_AVAILABILITY": "dump"}
    assert not take_the_lead(env, ["pretrain_gpt.py", "--enable-high-availability"]) and "HIGH_AVAILABILITY" in env
    assert take_the_lead(env, ["pretrain_gpt.py"]) and env == {"HIGH_AVAILABILITY_STRATEGY": "dump"}
    assert not take_the_lead(env, [])


def test_where_mindspeeds_adapter_leads_lastgasp_takes_no_part_and_the_job_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not leads_itself(Namespace()) and not leads_itself(Namespace(enable_high_availability=False))
    args = Namespace(enable_high_availability=True, reuse_fp32_param=True)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: args))
    training = Training(lambda: None)
    assert training._around_setup(lambda *given: given, (1, 2), {}) == (1, 2)
    assert training._run is None and "MindSpeed-LLM's own adapter of MindIO leads" in caplog.text


def test_the_users_handler_of_sigterm_stays_where_megatron_handles_another_signal() -> None:
    def handler(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        assert users_handler(Namespace(exit_signal_handler=True)) is None
        assert users_handler(Namespace(exit_signal_handler=True, exit_signal=signal.SIGTERM)) is None
        assert users_handler(Namespace(exit_signal_handler=True, exit_signal=signal.SIGUSR1)) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_who_trains_with_megatron_core_alone_is_told_that_nothing_is_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name in ("megatron.training.training", "megatron.core.parallel_state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    installation = Installation(lambda _: [])
    monkeypatch.setattr(installation, "_active", True)
    assert installation._trigger(lambda: "other users of torch.distributed", (), {}) and not caplog.text
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", cast(Any, SimpleNamespace()))
    for _ in range(2):
        installation._trigger(lambda: None, (), {})
    assert caplog.text.count("nothing is saved") == 1


def test_data_that_no_checkpoint_puts_back_are_noted() -> None:
    (loader,) = not_known(Namespace(dataloader_type="external"))
    assert "args.consumed_train_samples" in loader
    (drawn,) = not_known(Namespace(dataloader_type="single", fim_data=True))
    assert drawn.startswith("--fim-data") and "begin anew" in drawn
    assert not_known(Namespace(dataloader_type="cyclic", fim_data=False)) == not_known(Namespace()) == []


@pytest.mark.parametrize(
    ("args", "goes_on", "resumed", "ends"),
    [
        ({"exit_interval": 6}, True, 12, True),
        ({"exit_interval": 5}, True, 12, False),
        ({"exit_interval": None, "phase_transition_iterations": [6, 12]}, True, 12, True),
        ({"exit_interval": 6}, False, 12, False),  # another start: Megatron goes on, too
        ({"exit_interval": 6}, True, 11, False),  # trained since
    ],
)
def test_a_restart_behind_the_last_iteration_of_the_start_ends_as_megatron_would(
    args: dict[str, Any], goes_on: bool, resumed: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron asks behind each iteration; this one's fault came in between."""
    run = Run.__new__(Run)
    run.args, run._place = Namespace(**args), Place(rank=0, world_size=1, replicas=((0,),))
    run.state, run.selector = cast(Any, SimpleNamespace(steps=SimpleNamespace(step=12))), cast(
        Any, SimpleNamespace(goes_on=goes_on, resumed=resumed)
    )
    failed: list[BaseException] = []
    run.saver = cast(Any, SimpleNamespace())
    run.session = cast(Any, SimpleNamespace(progress=lambda kind: None))
    run.life = cast(Any, SimpleNamespace(failed=failed.append))
    monkeypatch.setattr(run, "begin", lambda: None)
    training = Training(lambda: None)
    monkeypatch.setattr(training, "_run", run)
    if ends:
        with pytest.raises(SystemExit) as caught:
            training._around_train(lambda: "trained", (), {})
        assert caught.value.code == 0 and failed == [caught.value]
    else:
        assert training._around_train(lambda: "trained", (), {}) == "trained" and not failed


def _own_loop(monkeypatch: pytest.MonkeyPatch, notes: list[str], ends: list[bool]) -> Training:
    """A script with a loop of its own has set up its model."""
    steps = SimpleNamespace(step=0, iteration_end=lambda: None)
    life = SimpleNamespace(begun=False, close=lambda completed: ends.append(completed))
    session = SimpleNamespace(progress=lambda kind: None, note=notes.append)
    run: Any = SimpleNamespace(
        state=SimpleNamespace(steps=steps, iteration_begin=lambda: None), life=life, session=session, marks=None
    )
    training = Training(lambda: None)
    monkeypatch.setattr(training, "_run", run)
    return training


def test_a_loop_of_ones_own_is_told_once_that_its_steps_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    training = _own_loop(monkeypatch, notes, [])
    assert [training._around_step(lambda x: x, (number,), {}) for number in (1, 2)] == [1, 2]
    assert len(notes) == 1 and "outside of Megatron's train(): after a fault nothing is saved" in notes[0]


@pytest.mark.parametrize(("printed", "completed"), [(None, True), (ValueError("in the loop"), False)])
def test_a_script_that_raised_outside_of_pretrain_has_not_ended_well(
    printed: Exception | None, completed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[bool] = []
    training = _own_loop(monkeypatch, [], ends)
    monkeypatch.setattr(sys, "last_value", printed, raising=False)
    training._at_exit()
    training._at_exit()
    assert ends == [completed]


@pytest.mark.parametrize("version", ["0.12.1", "0.16.1", "0.19.2", "0.19.2+local"])
def test_versions_that_were_tried(version: str) -> None:
    assert untried(version) == ""


@pytest.mark.parametrize("version", ["0.20.0", "0.20.0rc0", "0.19.3", "1.0.0", "0.12.0", "unknown"])
def test_others_are_warned_of(version: str) -> None:
    assert f"megatron-core {version} is not among" in untried(version) and "0.12.1 to 0.19.2" in untried(version)


def test_the_page_names_every_option_and_its_variable() -> None:
    actions = add_options(ArgumentParser())._actions
    options = {o for action in actions for o in action.option_strings if o.startswith("--lastgasp-")}
    rows = re.findall(r"^\| `(--lastgasp-[a-z0-9-]+)` \| `(LASTGASP_[A-Z0-9_]+)` \|", PAGE.read_text(), re.M)
    assert {option for option, _ in rows} == options
    for option, variable in rows:
        assert variable == option.removeprefix("--").upper().replace("-", "_")


def test_the_readme_names_every_module() -> None:
    named = set(re.findall(r"`(\w+\.py)`", README.read_text())) - {"__init__.py", "pretrain_gpt.py"}
    found = {path.name for path in (README.parent / "lastgasp_megatron").glob("*.py")} - {"__init__.py"}
    assert named == found


@pytest.mark.parametrize("path", [README, PAGE, ROOT / "examples/megatron_gpt/README.md"], ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target
