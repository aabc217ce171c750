"""Self-contained HTML pages with inline SVG charts: no scripts, no network access. All input is escaped."""

from freescale.page.charts import Axis, Mark, Series, assign_colours, curve_chart, histogram, line_chart, scatter
from freescale.page.markup import document, figure, grid, section, table
from freescale.page.timelines import Lane, StackedBar, TimelineSegment, heat_map, legend, stacked_bars, timeline
