# SPDX-License-Identifier: Apache-2.0
"""The fork in one picture, from the patches themselves: a Mermaid flowchart of what each
adds and which of upstream's files it edits.
"""

from collections import Counter
from collections.abc import Sequence

from packaging.version import Version

from fork.patch import Patch


def mermaid(series: Sequence[Patch], base: str) -> str:
    """The flowchart's source, for a Markdown block of language ``mermaid``.

    Args:
        series: the patches, in order.
        base: upstream's release, such as ``0.33.0``.
    """
    edited: list[str] = []
    lines = []
    for number, patch in enumerate(series):
        variant = patch.variant(Version(base))
        count = Counter(edit.file for edit in variant.edits) if variant else Counter()
        edited += [path for path in count if path not in edited]
        added = f"<br/>adds {_counted(len(patch.modules), 'module')}" if patch.modules else ""
        lines.append(f'    p{number}["{patch.name}{added}"]')
        lines += [
            f"    p{number} -->|{_counted(edits, 'edit')}| f{edited.index(path)}"
            for path, edits in count.items()
        ]
    files = [f'        f{n}["{path}"]' for n, path in enumerate(edited)]
    return "\n".join(
        [
            "flowchart LR",
            *lines,
            f'    subgraph upstream["vLLM {base}: files that are edited"]',
            *files,
            "    end",
        ]
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
