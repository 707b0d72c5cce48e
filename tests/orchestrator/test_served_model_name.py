"""Model names for clients never reveal paths."""

from __future__ import annotations

import pytest

from flyspec.client import GenerateOptions
from flyspec.errors import InvalidArgumentError
from flyspec.model_files import served_name
from tests.orchestrator.stacks import start_stack


@pytest.mark.parametrize(("given", "name"), [("", "target"), ("team/fast-1", "team/fast-1")])
async def test_clients_see_the_served_name_and_no_path(model_dirs, given, name):
    async with start_stack(model_dirs, verify={"served_model_name": given}) as stack:
        models = await stack.client.list_models()
        assert models.target.name == name
        text = await stack.client.complete("The cat", GenerateOptions(max_tokens=2))
        assert text.started.model == name
        with pytest.raises(InvalidArgumentError, match=f"{name} has ids") as refused:
            await stack.client.complete([5, 100_000], GenerateOptions(max_tokens=2))
        status = await stack.admin.status()
        told = [str(models), str(text), str(refused.value), str(status)]
        told += [str(drafter) for drafter in await stack.admin.list_drafters()]
        for directory in model_dirs:
            assert not any(directory in what for what in told)


def test_the_default_is_the_directory_s_name_or_the_hub_id(model_dirs, monkeypatch, tmp_path):
    assert served_name(model_dirs[0]) == "target"
    assert served_name(model_dirs[0] + "/") == "target"
    assert served_name("team/model") == "team/model"
    monkeypatch.chdir(model_dirs[0])
    assert served_name(".") == "target"
