"""Results for people: sentences, tables and charts, on a terminal or in one HTML file with nothing from elsewhere.

charts      what a chart shows: named series over positions or over categories, in one unit
page        a headline, charts, tables and notes
html        writes a page; needs the extra ``report``
page.html   its frame; page.css, light and dark; page.js, which draws with Chart.js 4.6.1, chart.umd.min.js, under
            the licence in chart.LICENSE.txt
"""
