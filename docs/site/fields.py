"""For the pages of docs/api: what griffe, which reads docstrings for mkdocs, does not know of how we write them."""

import re

import griffe


class Fields(griffe.Extension):
    """Describe a field of a dataclass by the comment on its own line, and let an argument be marked with a star."""

    def on_attribute_instance(self, *, attr, **kwargs):
        if attr.docstring is None and attr.lineno and isinstance(attr.parent, griffe.Class):
            comment = re.search(r"(?<!\S)# (.*)$", attr.lines_collection[attr.filepath][attr.lineno - 1])
            if comment:
                attr.docstring = griffe.Docstring(comment[1], lineno=attr.lineno, endlineno=attr.lineno, parent=attr)

    def on_class_instance(self, *, cls, **kwargs):
        if cls.docstring is not None:
            cls.docstring.value = re.sub(r"^( +\w+)\*: ", r"\1: (star) ", cls.docstring.value, flags=re.MULTILINE)
