# SPDX-License-Identifier: Apache-2.0
"""The tests that `fork export --upstream` sends along hold on the whole fork, too."""

from fork import proposal


def test_they_pass_here():
    code, said = proposal.run_on([])
    assert code == 0 and "passed" in said, said
