"""For the `page.py` of a study: what is known of the run, pictures, and names as the page shows them."""

from __future__ import annotations

from hookrun.report.draw.charts import Figure as Figure  # a picture with its title and notes
from hookrun.report.draw.charts import Series as Series  # a line of a chart
from hookrun.report.draw.charts import bars as bars  # a chart of bars
from hookrun.report.draw.charts import lines as lines  # a chart of lines
from hookrun.report.draw.pictures import LEVELS as LEVELS  # how many colours a palette has
from hookrun.report.draw.pictures import HeatMap as HeatMap  # a map of numbers
from hookrun.report.draw.pictures import encoded as encoded  # an array as the address of a picture
from hookrun.report.draw.pictures import is_light as is_light  # whether a colour needs dark text
from hookrun.report.draw.pictures import matrix as matrix  # cells by two keys as an array
from hookrun.report.draw.pictures import palette as palette  # the colours of a map
from hookrun.report.draw.text import common as common  # how many first pieces are equal
from hookrun.report.draw.text import module_name as module_name  # the path of a module, not too long
from hookrun.report.draw.text import number as number  # a number as the page shows it
from hookrun.report.draw.text import token_name as token_name  # a token as the page shows it
from hookrun.report.facts import MOST_ROWS as MOST_ROWS  # how many rows a table shows
from hookrun.report.facts import RunData as RunData  # the data of a run directory
from hookrun.report.lines import SampledLines as SampledLines  # the lines of a file, or some of them
from hookrun.report.lines import is_number as is_number  # whether a value of a record is a number
from hookrun.report.lines import is_place as is_place  # whether it is a whole number from 0
from hookrun.report.lines import sampled as sampled  # read the lines of a file in bounded memory
from hookrun.report.token_pictures import MOST_SAMPLES as MOST_SAMPLES  # how many samples are drawn
from hookrun.report.token_pictures import MOST_TOKENS as MOST_TOKENS  # how many tokens of each
from hookrun.report.token_pictures import Strips as Strips  # the coloured tokens of samples
from hookrun.report.token_pictures import Token as Token  # a token with its value
from hookrun.report.token_pictures import strips as strips  # draw them
