"""A sample text for the trial of a model: prose, code, numbers, other languages."""

TEXT = '''\
The lighthouse keeper had not expected anyone before the spring. When the small boat came round
the point, low in the water and with only half a sail, she put down her cup, took the long stairs
two at a time, and was on the jetty before it touched. "You are early," she said. The man in the
boat laughed, though his hands shook. "Four months late, I think. What year do you have here?"

def moving_average(values: list[float], width: int) -> list[float]:
    """The mean of each window of `width` values."""
    if width < 1:
        raise ValueError(f"width {width}: must be at least 1")
    total, found = sum(values[:width]), []
    for index in range(width, len(values) + 1):
        found.append(total / width)
        if index < len(values):
            total += values[index] - values[index - width]
    return found

Question: A bakery sells 48 rolls in the morning and half as many in the afternoon. Each roll costs
35 cents. How much does it take in a day? Answer: In the afternoon it sells 48 / 2 = 24 rolls, so
48 + 24 = 72 rolls in all. 72 * 0.35 = 25.20. The bakery takes in 25.20 a day.

| city     | 1950    | 2000      | change |
|----------|---------|-----------|--------|
| Aachen   | 129,811 | 244,386   | +88 %  |
| Bilbao   | 229,334 | 353,950   | +54 %  |
| Catania  | 299,629 | 313,110   | +4.5 % |

SELECT name, COUNT(*) AS orders FROM customers JOIN orders USING (customer_id)
WHERE placed_at >= '2021-03-01' GROUP BY name HAVING COUNT(*) > 3 ORDER BY orders DESC LIMIT 10;

Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. It happens in two parts:
first, light splits water and charges small carriers of energy; then, in the dark if need be, those
carriers pay for building sugar out of carbon dioxide. 6 CO2 + 6 H2O -> C6H12O6 + 6 O2.

Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung. Le chat dort sur la chaise près de la
fenêtre. El río nace en las montañas y llega al mar en tres días. Über 1.000 Gäste kamen am 17. Mai.

{"id": 7041, "tags": ["red", "large"], "price": {"amount": 19.99, "currency": "EUR"}, "stock": null}

Once more, then, slowly: open the valve, count to ten, close the valve, read the gauge. Open the
valve, count to ten, close the valve, read the gauge. If it shows more than 3.5, call me. If it
shows less, do nothing. Either way, write the number down with the date, as we did last year.
'''
