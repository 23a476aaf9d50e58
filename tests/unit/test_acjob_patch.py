"""Patches of AscendJob files: what each strategy needs is there afterwards, and nothing else has changed."""

from __future__ import annotations

import difflib
import io
import itertools
import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lastgasp.errors import ConfigError
from lastgasp.jobs.acjob.check import SIZE_LIMIT, check, errors, read, source_of
from lastgasp.jobs.acjob.edit import CannotEdit
from lastgasp.jobs.acjob.patch import GOALS, Patched, goals_of, patch
from support.acjob import NAME, bare, ready

COMMON = ("retry", "recover-in-place", "recover", "dump", "pod-rescheduling", "grace-exit")
BY_FRAMEWORK = {"pytorch": GOALS, "mindspore": COMMON, "tensorflow": ("pod-rescheduling",)}


def combinations() -> list[tuple[str, tuple[str, ...]]]:
    """Each goal, each pair and all together, for each framework."""
    found = []
    for framework, goals in BY_FRAMEWORK.items():
        sets = [(one,) for one in goals] + list(itertools.combinations(goals, 2)) + [tuple(goals)]
        found += [(framework, chosen) for chosen in dict.fromkeys(sets)]
    return found


def patched(text: str, strategy: str = "dump", name: str | None = None) -> Patched:
    return patch(source_of(NAME, text.encode()), goals_of(strategy), name)


def changes(before: str, after: str) -> tuple[list[str], list[str]]:
    """Lines that are gone and lines that are new."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [one[2:] for one in lines if one[0] == "-"], [one[2:] for one in lines if one[0] == "+"]


def named(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("framework", "goals"), combinations(), ids=named)
def test_patched_files_pass_and_a_second_patch_changes_nothing(framework: str, goals: tuple[str, ...]) -> None:
    before = bare(framework)
    once = patched(before, ",".join(goals))
    assert errors(once.diagnoses) == []
    assert once.after != before
    gone, new = changes(before, once.after)
    assert gone == [] and len(new) > 10
    again = patched(once.after, ",".join(reversed(goals)))
    assert again.after == once.after and again.diff("x") == ""


@pytest.mark.parametrize("framework", BY_FRAMEWORK)
@pytest.mark.parametrize("strategy", ["", "pod-rescheduling"])
def test_what_marks_need_and_nothing_else(framework: str, strategy: str) -> None:
    """The guide's two mounts and its port, in each replica type; recoveries stay as they are."""
    goals, text = goals_of(strategy) if strategy else (), bare(framework)
    once = patch(source_of(NAME, text.encode()), goals, marks=True)
    assert errors(once.diagnoses) == []
    document = YAML(typ="safe").load(io.StringIO(once.after))
    for replica in document["spec"]["replicaSpecs"].values():
        pod = replica["template"]["spec"]
        [container] = [one for one in pod["containers"] if one["name"] == "ascend"]
        volumes = {one["name"]: one.get("hostPath") for one in pod["volumes"]}
        mounted = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        job, space = document["metadata"]["name"], document["metadata"].get("namespace", "default")
        there = "/user/cluster-info/datatrace-config"
        assert mounted[there] == {"path": f"{there}/{space}.data-trace-{job}", "type": "DirectoryOrCreate"}
        assert mounted["/user/cluster-info/profiling"]["path"] == "/home/profilingdatapath"
        assert {"containerPort": 9601, "name": "taskd-port"} in container["ports"]
    again = patch(source_of(NAME, once.after.encode()), goals, marks=True)
    assert again.after == once.after
    if not strategy:
        labels = YAML(typ="safe").load(io.StringIO(text))["metadata"]
        assert document["metadata"] == labels
        assert patch(source_of(NAME, ready().encode()), (), marks=True).after.count("recover-strategy") == 1


def test_a_mount_of_marks_that_is_there_is_corrected_at_most() -> None:
    after = patch(source_of(NAME, bare("pytorch").encode()), (), marks=True).after
    own = after.replace("/home/profilingdatapath", "/data/marks")
    other = own.replace(".data-trace-", ".data-trace-other-")
    assert own != after and other != own
    assert patch(source_of(NAME, other.encode()), (), marks=True).after == own


def test_a_mount_of_a_volumes_folder_and_a_volume_with_other_mounts() -> None:
    """The first is right as it is; of the second, the other mount keeps its directory."""
    after = patch(source_of(NAME, bare("pytorch").encode()), (), marks=True).after
    place = "/user/cluster-info/datatrace-config"
    job = next(line.split("/")[-1] for line in after.splitlines() if f"path: {place}/" in line)
    below = after.replace(f"path: {place}/{job}", f"path: {place}")
    below = below.replace(f"mountPath: {place}\n", f"mountPath: {place}\n                  subPath: {job}\n")
    assert below.count("subPath") == after.count(f"mountPath: {place}\n") > 0
    assert patch(source_of(NAME, below.encode()), (), marks=True).after == below
    line = f"mountPath: {place}\n"
    shared = after.replace(f"path: {place}/{job}", "path: /data").replace(
        line, f"{line}                - name: datatrace\n                  mountPath: /data\n"
    )
    once = patch(source_of(NAME, shared.encode()), (), marks=True)
    assert errors(once.diagnoses) == []
    for replica in YAML(typ="safe").load(io.StringIO(once.after))["spec"]["replicaSpecs"].values():
        pod = replica["template"]["spec"]
        volumes = {one["name"]: one.get("hostPath", {}).get("path") for one in pod["volumes"]}
        [container] = [one for one in pod["containers"] if one["name"] == "ascend"]
        mounted = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert (mounted[place], mounted["/data"]) == (f"{place}/{job}", "/data")


@pytest.mark.parametrize("more", ["", '    sp-block: "16"\n'])
def test_rescheduling_of_pods_leaves_no_strategy_of_processes(more: str) -> None:
    """As in MindCluster's sample for Qwen3, which names all of them."""
    line = '    recover-strategy: "retry,recover,dump,exit,elastic-training"\n'
    text = ready().replace('    recover-strategy: "dump"\n', line + more)
    assert line in text
    after = patched(text, "pod-rescheduling").after
    assert "recover-strategy" not in after
    assert ("annotations:" in after) == bool(more) and more in after
    gone, _ = changes(text, after)
    assert set(gone) <= {line.rstrip(), "  annotations:"}
    assert patched(after, "pod-rescheduling").after == after


def test_what_a_framework_does_not_have_is_not_named_as_allowed() -> None:
    for framework, goal, never in (
        ("mindspore", "elastic-training", ["elastic-training"]),
        ("tensorflow", "dump", ["dump", "grace-exit", "retry"]),
    ):
        with pytest.raises(ConfigError) as caught:
            patched(bare(framework), goal)
        allowed = str(caught.value).partition("one of")[2].partition(".")[0]
        assert "pod-rescheduling" in allowed
        assert not [one for one in never if one in allowed]


def test_one_strategy_after_the_other_ends_with_the_last() -> None:
    text = bare()
    goals = [one for one in GOALS if one != "grace-exit"]
    for goal in (*goals, *reversed(goals)):
        result = patched(text, goal)
        assert errors(result.diagnoses) == [], goal
        text = result.after
    assert text.count("POD_IP") == text.count("TTP_PORT") == text.count("taskd-port") == 2


def test_dump_is_not_taken_from_a_job_that_saves_by_it() -> None:
    result = patched(patched(bare(), "grace-exit").after, "recover")
    assert [one.rule for one in errors(result.diagnoses)] == ["grace-exit-dump"]


def test_to_kubernetes_parser_every_label_annotation_and_variable_is_a_string() -> None:
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    text = bare().replace("    ring-controller.atlas: ascend-910b", "    tor-affinity: off\n    fault-scheduling: yes")
    job = reader.load(patched(text, ",".join(GOALS)).after)
    found = [*job["metadata"]["labels"].values(), *job["metadata"]["annotations"].values()]
    for replica in job["spec"]["replicaSpecs"].values():
        found += [one.get("value", "") for one in replica["template"]["spec"]["containers"][0]["env"]]
    assert {type(one) for one in found} == {str}
    assert job["metadata"]["labels"]["tor-affinity"] == "off"


def test_a_port_that_is_there_under_another_name_is_not_given_twice() -> None:
    """The operator's schema has ports as a map by number and protocol: the API server would refuse the job."""
    first = "                - containerPort: 2222\n"
    for number, name in ((9601, "mine"), (8000, "http")):
        text = bare().replace(
            first, f"                - containerPort: {number}\n                  name: {name}\n{first}"
        )
        result = patched(text)
        assert errors(result.diagnoses) == []
        assert result.after.count(f"containerPort: {number}\n") == 2 and result.after.count(f"name: {name}\n") == 2
    unnamed = patched(bare().replace(first, f"                - containerPort: 9601\n{first}"))
    assert errors(unnamed.diagnoses) == []
    assert unnamed.after.count("                - containerPort: 9601\n                  name: taskd-port\n") == 2


def test_a_port_under_the_others_name_gives_its_number_back() -> None:
    text = bare().replace("containerPort: 2222\n                  name: ascendjob-port",
                          "containerPort: 8000\n                  name: taskd-port")  # fmt: skip
    after = patched(text).after
    assert "containerPort: 9601\n                  name: taskd-port" in after
    assert "containerPort: 8000\n                  name: ttp-port" in after and errors(patched(text).diagnoses) == []


def test_values_in_quotes_that_must_be_numbers_and_empty_ones_are_put_right() -> None:
    text = ready().replace("containerPort: 9601", 'containerPort: "9601"').replace("replicas: 1", "replicas: '1'")
    text = text.replace('value: "8000"', "value:").replace('fault-scheduling: "grace"', "fault-scheduling:")
    assert patched(text).after == ready()


def test_a_value_that_others_repeat_does_not_change_for_them() -> None:
    """`*off` of another label stays off; where the change would have to follow, it is refused."""
    base = bare()
    text = base.replace("    framework", '    tor-affinity: &off "off"\n    fault-scheduling: *off\n    framework', 1)
    result = patched(text)
    assert errors(result.diagnoses) == [] and 'tor-affinity: &off "off"\n    fault-scheduling: "grace"' in result.after
    text = base.replace("    framework", '    fault-scheduling: &off "off"\n    tor-affinity: *off\n    framework', 1)
    with pytest.raises(CannotEdit, match=r"line 9: \*off"):
        patched(text)
    text = 'x-common: &common\n  fault-scheduling: "off"\n' + base.replace(
        "    framework", "    <<: *common\n    framework"
    )
    result = patched(text)
    assert errors(result.diagnoses) == [] and result.after.count('fault-scheduling: "off"') == 1
    assert patched(result.after).after == result.after


def test_a_number_that_is_a_port_and_a_variable_stays_a_port() -> None:
    text = (
        ready()
        .replace('value: "8000"', "value: &port 8000", 1)
        .replace("containerPort: 8000", "containerPort: *port", 1)
    )
    with pytest.raises(CannotEdit, match=r"\*port repeats"):
        patched(text)


def test_a_label_that_the_pods_have_as_well_changes_with_the_jobs() -> None:
    """Volcano would join two values to one that it does not know."""
    text = bare().replace(
        "      template:\n", "      template:\n        metadata: {labels: {fault-scheduling: force}}\n", 1
    )
    result = patched(text)
    assert errors(result.diagnoses) == [] and result.after.count('fault-scheduling: "grace"') == 2
    once = patched(text.replace("    framework", '    fault-scheduling: "grace"\n    framework', 1))
    assert errors(once.diagnoses) == [] and "force" not in once.after
    kept = patched(text.replace("    framework", '    fault-scheduling: "force"\n    framework', 1), "recover")
    assert errors(kept.diagnoses) == [] and "grace" not in kept.after


def test_a_variable_from_the_pods_fields_gets_no_value_beside_that() -> None:
    text = ready().replace('value: "8000"', "valueFrom: {fieldRef: {fieldPath: metadata.name}}")
    result = patched(text)
    assert result.after == text and "ttp-port" in {one.rule for one in errors(result.diagnoses)}


def test_what_a_strategy_does_not_do_is_noted() -> None:
    (note,) = patched(bare(), "elastic-training").notes
    assert "Name dump as well" in note
    assert patched(bare(), "elastic-training,dump").notes == ()
    (note,) = patched(bare("tensorflow"), "pod-rescheduling").notes
    assert "job-level rescheduling alone for TensorFlow" in note


def test_elastic_training_waits_for_mindx_unless_recover_is_tried_before() -> None:
    assert patched(bare(), "elastic-training").after.count("MINDIO_WAIT_MINDX_TIME") == 2
    assert patched(bare(), "elastic-training,recover-in-place").after.count("MINDIO_WAIT_MINDX_TIME") == 2
    assert "MINDIO_WAIT_MINDX_TIME" not in patched(bare(), "elastic-training,recover").after


def test_a_difference_has_the_lines_of_the_file() -> None:
    text = (
        bare()
        .replace("image: team/train:1", 'image: "team/train:1"   # one')
        .replace("spec:\n", 'x: "a\u2028b"\nspec:\n', 1)
    )
    diff = patched(text).diff("x")
    assert "No newline" not in diff and all(line[:1] in ("@", "+", "-", " ") for line in diff.split("\n")[:-1])


def test_a_file_without_a_job_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="kind AscendJob"):
        patched("apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\nmetadata: {name: x}\n")


def test_the_strategy_is_in_clusterds_order_without_blanks() -> None:
    after = patched(bare(), "dump, recover ,retry").after
    assert 'recover-strategy: "retry,recover,dump"' in after


def test_strategies_that_are_there_in_another_order_stay() -> None:
    text = ready("dump,retry")
    assert patched(text, "retry,dump").after == text
    assert 'recover-strategy: "dump"' in patched(text, "dump").after


def test_wrong_values_are_put_right_and_good_ones_kept() -> None:
    text = ready("dump").replace('"8000"', "8005", 1).replace("containerPort: 9601", "containerPort: 9999", 1)
    text = text.replace('fault-scheduling: "grace"', "fault-scheduling: off   # why").replace("8000", "8005", 1)
    after = patched(text, "dump").after
    assert after.count('value: "8005"') == 2 and after.count("containerPort: 8005") == 2
    assert after.count("containerPort: 9601") == 2
    assert 'fault-scheduling: "grace"   # why' in after
    force = ready("recover", labels='    fault-scheduling: "force"\n    fault-retry-times: "7"\n')
    assert 'fault-scheduling: "force"' in patched(force, "recover").after
    assert 'fault-retry-times: "7"' in patched(force, "recover").after
    assert 'fault-scheduling: "grace"' in patched(force, "recover,dump").after


def test_an_error_that_no_patch_removes_is_left_in_the_findings() -> None:
    result = patched(bare().replace("image: team/train:1", "image:", 1))
    assert [one.rule for one in errors(result.diagnoses)] == ["container-image"]


def test_a_wrong_reset_mount_and_a_name_that_is_taken() -> None:
    text = ready().replace("team.reset-config-llama", "other")
    assert patched(text).after.count("team.reset-config-llama") == 2
    taken = bare().replace("- name: code\n              nfs:", "- name: reset-config\n              nfs:")
    after = patched(taken).after
    assert after.count("name: lastgasp-reset-config") == 4


@pytest.mark.parametrize(
    ("strategy", "framework"),
    [("elastic-training", "mindspore"), ("dump", "tensorflow"), ("grace-exit", "tensorflow"), ("retry", "tensorflow")],
)
def test_what_a_framework_does_not_have_is_refused(strategy: str, framework: str) -> None:
    with pytest.raises(ConfigError, match=f"for {framework}"):
        patched(bare(framework), strategy)


@pytest.mark.parametrize("text", ["", ",", "save", "exit", "Dump"])
def test_unknown_strategies_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="strategy"):
        goals_of(text)


def test_without_a_framework_nothing_is_guessed() -> None:
    with pytest.raises(ConfigError, match="framework"):
        patched(bare().replace("framework: pytorch", "framework: jax"))


# -- how files are written ------------------------------------------------------------------------


def test_windows_line_ends_and_a_byte_order_mark_stay(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + bare().replace("\n", "\r\n").encode()
    source = source_of(NAME, data)
    after = patch(source, ("dump",)).after
    assert source.bom and "\n" not in after.replace("\r\n", "")
    assert patch(source_of(NAME, after.encode()), ("dump",)).after == after


def test_a_file_without_a_last_newline() -> None:
    result = patched(bare().rstrip("\n"))
    assert not result.after.endswith("\n") and errors(result.diagnoses) == []
    assert "No newline at end of file" in result.diff("x")


def test_lists_below_their_key() -> None:
    text = bare()
    flattest = YAML(typ="rt")
    flattest.indent(mapping=2, sequence=2, offset=0)
    out = io.StringIO()
    flattest.dump(flattest.load(text), out)
    result = patched(out.getvalue())
    assert errors(result.diagnoses) == [] and "\n            - name: POD_IP\n" in result.after


def test_json_and_brackets() -> None:
    plain = YAML(typ="safe", pure=True).load(bare())
    for text in (json.dumps(plain), json.dumps(plain, indent=2)):
        result = patched(text, "recover,dump")
        assert errors(result.diagnoses) == []
        assert json.loads(result.after)["metadata"]["annotations"]["recover-strategy"] == "recover,dump"
        assert patched(result.after, "recover,dump").after == result.after


def test_anchors_aliases_and_merge_keys() -> None:
    text = bare()
    begin = text.index("    Worker:")
    alias = text[:begin].replace("      template:\n", "      template: &pod\n")
    alias += "    Worker:\n      replicas: 1\n      restartPolicy: Never\n      template: *pod\n"
    result = patched(alias, "dump,recover")
    assert errors(result.diagnoses) == [] and result.after.count("POD_IP") == 1
    assert patched(result.after, "dump,recover").after == result.after
    merge = text[:begin].replace("    Master:\n", "    Master: &one\n")
    merge += "    Worker:\n      <<: *one\n      replicas: 1   # as many\n"
    result = patched(merge, "recover")
    assert errors(result.diagnoses) == [] and result.after.count("POD_IP") == 1
    shared = text.replace("              env:\n", "              env: &env\n", 1)
    second = shared.index("              env:\n")
    end = shared.index("              command", second)
    shared = shared[:second] + "              env: *env\n" + shared[end:]
    result = patched(shared)
    assert errors(result.diagnoses) == [] and result.after.count("POD_IP") == 1


def test_keys_that_hold_nothing_yet() -> None:
    text = bare().replace("  labels:\n", "  annotations:   # none yet\n  labels:\n")
    text = text.replace("              ports:\n                - containerPort: 2222\n                  name: "
                        "ascendjob-port\n", "              ports: ~   # later\n", 1)  # fmt: skip
    text = text.replace("          volumes:\n            - name: code\n              nfs:\n                server: "
                        "127.0.0.1\n                path: /data/code\n", "          volumes: []\n", 1)  # fmt: skip
    result = patched(text)
    assert errors(result.diagnoses) == []
    assert "  annotations:   # none yet\n    recover-strategy" in result.after
    assert "# later\n                - containerPort: 9601\n" in result.after
    assert 'volumes: [{name: "reset-config", hostPath: {path: "' in result.after


def test_comments_unknown_keys_and_order_stay() -> None:
    text = bare().replace("spec:\n", "x-ours: {deep: [1, two]}   # ours\nspec:\n", 1)
    text = text.replace("              command:", "              # before the command\n              command:")
    gone, _ = changes(text, patched(text).after)
    assert gone == []


def test_of_several_documents_each_job_is_patched_or_the_named_one() -> None:
    other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  a: on\n"
    text = f"{other}---\n{bare()}---\n{bare('mindspore').replace('name: llama', 'name: gpt')}...\n"
    result = patched(text)
    assert errors(result.diagnoses) == [] and result.after.count('recover-strategy: "dump"') == 2
    assert result.after.startswith(other) and result.after.endswith("...\n")
    one = patched(text, "dump", "gpt").after
    assert one.count("recover-strategy") == 1 and one.index("recover-strategy") > one.index("name: gpt")
    with pytest.raises(ConfigError, match="llama, gpt"):
        patched(text, "dump", "vanish")


def test_jobs_in_a_list() -> None:
    inner = "".join(f"    {line}\n" for line in bare().splitlines()[1:])
    text = "apiVersion: v1\nkind: List\nitems:\n  -\n" + inner
    result = patched(text)
    assert errors(result.diagnoses) == [] and result.after.count("recover-strategy") == 1


def test_block_scalars_at_the_end_are_not_lengthened() -> None:
    args = '              args: ["cd /job/code && bash train_start.sh"]\n'
    pad = " " * 16
    text = bare().replace(args, f"              args:\n{pad}- |\n{pad}  cd /job\n\n{pad}  bash x\n\n")
    script = YAML(typ="safe", pure=True).load(text)["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    whole = YAML(typ="safe", pure=True).load(patched(text).after)
    after = whole["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    assert after["containers"][0]["args"] == script["containers"][0]["args"] == ["cd /job\n\nbash x\n"]


@pytest.mark.slow
def test_a_file_of_one_megabyte() -> None:
    pad = " " * 16
    filler = "".join(f'{pad}- name: V{n}   # number {n}\n{pad}  value: "{n}"\n' for n in range(18_000))
    text = bare().replace("              env:\n", "              env:\n" + filler, 1)
    assert len(text) > 1_000_000
    result = patched(text)
    assert errors(result.diagnoses) == []
    diff = result.diff("job.yaml")
    assert diff.count("\n+") > 10 and diff.count("\n-") == 0


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in itertools.pairwise("abcdefghij")
)
"""Aliases of aliases: ten lines that say four thousand million things."""


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (bare().replace("    framework", "\tframework"), "yaml-syntax"),
        (bare().replace("  name: llama\n", "  name: *nobody\n"), "yaml-syntax"),
        (bare().replace("  name: llama\n", "  name: llama\n  name: llama\n"), "yaml-duplicate-key"),
        ("&a [" * 200 + "]" * 200, "yaml-syntax"),
        (LAUGHS, "yaml-syntax"),
        ("x: &x {y: *x}\n", "yaml-syntax"),
        ("kind: AscendJob\x07\n", "yaml-syntax"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_finding_and_is_not_patched(text: str, rule: str) -> None:
    result = patched(text)
    assert rule in {one.rule for one in errors(result.diagnoses)}


def test_other_encodings_are_named() -> None:
    source = source_of(NAME, bare().encode("utf-16"))
    assert source.problem is not None and "UTF-8" in source.problem.fix
    assert source_of(NAME, b"a: b\nc: \xff\n").problem.line == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n---\n", "\ufeff"])
def test_empty_files_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        source_of(NAME, text.encode())


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n"])
def test_documents_that_are_no_map(text: str) -> None:
    with pytest.raises(ConfigError, match="AscendJob"):
        check([source_of(NAME, text.encode())])
    with pytest.raises(ConfigError, match="AscendJob"):
        patched(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FILE"):
        read(tmp_path / "absent.yaml")
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(SIZE_LIMIT + 1)
    with pytest.raises(ConfigError, match="at most"):
        read(huge)


def test_a_map_in_the_place_of_a_list_is_not_guessed_at() -> None:
    text = bare().replace("              ports:\n                - containerPort: 2222\n                  name: "
                          "ascendjob-port\n", "              ports: none\n", 1)  # fmt: skip
    with pytest.raises(CannotEdit, match="ports holds 'none'"):
        patched(text)
