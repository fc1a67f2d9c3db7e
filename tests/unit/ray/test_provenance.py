"""Every trained token was made by weights that the loop sent: anything else is refused before it is trained on."""

from __future__ import annotations

import pytest

from slime.ray.train_actor import check_provenance
from slime.utils.errors import DataError


def test_tokens_of_the_version_that_generated_the_rollout_are_trained():
    check_provenance(4, {"sample_indices": [7, 8], "weight_versions": [["3"], ["3", "3"]]}, "3")


@pytest.mark.parametrize("versions", [["2"], ["3", "2"], ["default"]])
def test_tokens_of_foreign_weights_are_refused_with_sample_and_versions(versions: list[str]):
    batch = {"sample_indices": [7, 8], "weight_versions": [["3"], versions]}
    with pytest.raises(DataError, match=r"sample 8 of rollout 4 .* held version 3"):
        check_provenance(4, batch, "3")


def test_replayed_rollouts_have_no_version_to_check():
    check_provenance(4, {"sample_indices": [7], "weight_versions": [["2"]]}, None)


def test_a_continued_response_may_have_begun_with_older_weights_but_not_with_newer_ones():
    check_provenance(4, {"sample_indices": [7], "weight_versions": [["2", "4"]]}, "4", allows_older=True)
    for versions in (["2", "5"], ["default", "4"]):
        with pytest.raises(DataError, match="sample 7"):
            check_provenance(4, {"sample_indices": [7], "weight_versions": [versions]}, "4", allows_older=True)
