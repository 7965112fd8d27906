"""Pages that show results: one HTML file each, with charts, tables and sentences, and nothing from elsewhere.

Needs the extra ``report``. In the order in which a result passes them:

    charts      what a chart shows: named series over positions or over categories, in one unit
    page        a headline, charts, tables and notes, written into one file
    page.html   its frame; page.css, light and dark; page.js, which draws with Chart.js 4.6.1, chart.umd.min.js, under
                the licence in chart.LICENSE.txt
"""
