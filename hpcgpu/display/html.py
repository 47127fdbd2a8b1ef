"""HTML, as notebooks show it: templates of jinja2, which escapes all text.

There is no style sheet, because viewers of notebooks remove it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

#: What each template may use: a table with a title above each column, a table of names and texts, and a paragraph for
#: each line.
_MACROS = """
{% macro table(titles, rows) -%}
  <table><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr>
  {%- for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{%- endmacro %}
{% macro facts(named) -%}
  <table>
  {%- for name, text in named -%}
    <tr><th style='text-align:left;vertical-align:top'>{{ name }}</th><td style='text-align:left'>{{ text }}</td></tr>
  {%- endfor %}</table>
{%- endmacro %}
{% macro paragraphs(lines, bold=false) -%}
  {% for line in lines %}<p>{% if bold %}<b>{{ line }}</b>{% else %}{{ line }}{% endif %}</p>{% endfor %}
{%- endmacro %}
"""


@cache
def _environment() -> Environment:
    import jinja2  # takes long

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.globals.update(vars(environment.from_string(_MACROS).module))
    return environment


def html(template: str, **values: Any) -> str:
    """Return a template with these values, escaped. It may use ``table``, ``facts`` and ``paragraphs``."""
    return _environment().from_string(template).render(values)
