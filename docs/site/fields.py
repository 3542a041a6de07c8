"""For the pages of docs/api: a field of a dataclass is described by the comment on its own line."""

import re

import griffe


class Fields(griffe.Extension):
    """Give attributes without a docstring that comment as theirs."""

    def on_attribute_instance(self, *, attr, **kwargs):
        if attr.docstring is None and attr.lineno and isinstance(attr.parent, griffe.Class):
            line = attr.module.lines_collection[attr.filepath][attr.lineno - 1]
            comment = re.search(r"(?<!\S)# (.*)$", line)
            if comment:
                attr.docstring = griffe.Docstring(comment[1], lineno=attr.lineno, endlineno=attr.lineno, parent=attr)
