"""Formats of numbers, and what each means. A text that may mean several things means nothing."""

import time
from fractions import Fraction
from itertools import product

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards import Sample
from asyncrl.rewards.number_parser import last_number
from asyncrl.rewards.templates import numeric
from tests import golden

NUMBERS: dict[str, float] = {
    # plain
    **dict.fromkeys(("72", "it is 72", "It is 72.", "is it 72?", "72\n", "72, I think", "x = 72", "x=72"), 72),
    **dict.fromkeys(("Answer:72", "**Answer:** 72", "*Answer:* 72", "**Answer**: 72", "#### 72", "####72"), 72),
    **dict.fromkeys(("so #72", "**72**", "`72`", "_72_", '"72"', "(72)", "[72]", "{72}", "the sum (that is 72)"), 72),
    **dict.fromkeys(("8 (and so 72)", "of 3 m and then (in all 72)", "it is red (or 72)", "the answer\nis\n72"), 72),
    **dict.fromkeys(("72 - because", "<answer>72</answer>", "<b>72</b> it is", "It is 72…", "72 — because"), 72),
    **dict.fromkeys(("equal to 72",), 72),
    **dict.fromkeys(("007", "3 + 4 = 7"), 7),
    "0": 0,
    **dict.fromkeys(("5.", "5.0", "5 apples", "5 times a day", "Answer : 5", "of 3 m, then 5", "x = 3, y = 5"), 5),
    **dict.fromkeys(("There are 3. 5 is right", "Question 3: 5", "12 and we got = 5"), 5),
    ".5": 0.5,
    "0.3333": 0.3333,
    "**Final answer:** $42$": 42,
    "**Answer:** -5": -5,
    "first 3, then 4": 4,
    # signs
    **dict.fromkeys(("-5", "x = -5", "x = - 5", "−5", "it is −5.", "(-5)", "-5%"), -5),
    "+5": 5,
    "-.5": -0.5,
    "-0": 0,
    "first 3, then -4": -4,
    "-1,234": -1234,
    "-1e3": -1000,
    # thousands
    **dict.fromkeys(("1,234", "1’234", "1\u202f234", "#### 1,234", "1{,}234", r"1\,234"), 1234),
    **dict.fromkeys(("1,234.50 dollars", "1\u2009234.5", "1.234,5", "1\u202f234,5"), 1234.5),
    **dict.fromkeys(("1,234,567", "1'234'567", "1_234_567", "1\xa0234\xa0567", r"1\,234\,567"), 1234567),
    "12,345": 12345,
    "123,456.7": 123456.7,
    "1.234.567,89": 1234567.89,
    "1.234": 1.234,
    r"10,\!000": 10000,
    # fractions
    **dict.fromkeys(("3/4", "3⁄4", "¾ of it"), 0.75),
    "-1/2": -0.5,
    **dict.fromkeys(("1 1/2", "1½", "1 ½"), 1.5),
    "-1 1/2": -1.5,
    **dict.fromkeys(("½", "(1/2)"), 0.5),
    "6/3": 2,
    "x = 1/8": 0.125,
    "1,000/8": 125,
    "12/25": 0.48,
    # powers of ten
    **dict.fromkeys(("1e3", "1E3", "10^3"), 1000),
    "1.5e-4": 0.00015,
    **dict.fromkeys(("1.5E+4", r"1.5 \cdot 10^4"), 15000),
    "-2e2": -200,
    **dict.fromkeys(("2 x 10^3", "2×10^3", "2*10^3", "2 · 10^3", r"2 \times 10^{3}"), 2000),
    "2 × 10⁻³": 0.002,
    "10⁶": 1000000.0,
    "10^-3": 0.001,
    "-10^3": -1000,
    "10^{-2}": 0.01,
    "x = 10^2": 100,
    # percent, currencies, units, words
    **dict.fromkeys(("50%", "50 %", "50 percent", r"50\%"), 50),
    **dict.fromkeys(("5‰", "$5", "5€", "€5", "US$5", "5 USD", "USD 5", "5USD", "5km", "5 km", "5 m^2", "5 m²"), 5),
    **dict.fromkeys(("5 cm^3", "5ms", "5 seconds"), 5),
    "$1,234.50": 1234.5,
    "£3.50": 3.5,
    **dict.fromkeys(("-$5", "$-5"), -5),
    "¥500": 500,
    "99¢": 99,
    **dict.fromkeys(("60 km/h", "60km/h"), 60),
    "9.8 m/s^2": 9.8,
    **dict.fromkeys(("20°C", "20 °C"), 20),
    "90°": 90,
    "12kg.": 12,
    **dict.fromkeys(("5 million", "$5 million"), 5000000.0),
    "2 thousand": 2000,
    "1.5 billion dollars": 1500000000.0,
    "3 dozen": 36,
    "2 hundred.": 200,
    # LaTeX and boxes
    **dict.fromkeys((r"\boxed{42}", r"\boxed{ 42 }", r"$\boxed{42}$.", r"\boxed{42} of 50"), 42),
    r"\boxed{-3}": -3,
    r"\boxed{1} or \boxed{2}": 2,
    **dict.fromkeys((r"\boxed{\frac{3}{4}}", r"\boxed{\dfrac{3}{4}}", r"\frac34"), 0.75),
    **dict.fromkeys((r"-\frac{1}{2}", r"\boxed{\tfrac{-1}{2}}"), -0.5),
    r"1\frac{1}{2}": 1.5,
    **dict.fromkeys((r"\boxed{x = 5}", "$5$", "$$5$$", r"\(5\)", r"\[ 5 \]", r"\boxed{5\text{ cm}}"), 5),
    **dict.fromkeys((r"\boxed{\$5}", r"\boxed{\text{5}}", r"\boxed{\mathbf{5}}", r"5\,\mathrm{km}", r"\approx 5"), 5),
    **dict.fromkeys(("≈ 5", "≈5", "~5", r"\boxed{\left(5\right)}"), 5),
    "$-5$": -5,
    r"\boxed{50\%}": 50,
    r"\boxed{1{,}234}": 1234,
    **dict.fromkeys((r"\boxed{90^\circ}", r"\boxed{90^{\circ}}"), 90),
    r"\boxed{1,234,567}": 1234567,
    r"\boxed{3 \times 10^{5}}": 300000,
    # other scripts
    **dict.fromkeys(("１２", "१२", "答案是１２。", "答えは１２個です", "答案為12。", "答案是**12**。"), 12),
    **dict.fromkeys(("**答案：12**", "答案是$12$。", r"答案是\(12\)。", "정답: 12개", "총 12명입니다."), 12),
    **dict.fromkeys(("12%입니다", "الجواب هو ١٢", "उत्तर १२ है।", "คำตอบคือ12", "คำตอบคือ ๑๒", "Ответ: 12."), 12),
    **dict.fromkeys(("Ответ:12", "Ответ: 12 рублей", "₽12", "12₽", "￥１２", "12元", "人民币12元", "约12公里"), 12),
    **dict.fromkeys(("12公里/小时", "12平方米", "12平方厘米", "12立方米", "12㎡", "12㎏", "12℃。", "3加9是12"), 12),
    **dict.fromkeys(("3乘4得到12", "3+9=12", "9는 12", "3と9の合計は12です", "x=12", "$x=12$。", "答案：\n12"), 12),
    **dict.fromkeys(("12！", "答案是12，因为如此", "答案是12。因为如此", "12。这是答案", r"\fbox{12}"), 12),
    **dict.fromkeys((r"\boxed {12}", r"\boxed12", r"\boxed 12", r"\boxed{\text{12元}}", r"\boxed{12\text{元}}"), 12),
    **dict.fromkeys((r"\boxed{12 \text{ apples}}", r"\boxed{\textbf{12}}", '{"answer":12}', '{"answer": "12"}'), 12),
    **dict.fromkeys(('```json\n{"answer": 12}\n```', 'So: {"result": 12}', '{"final_answer": "\\boxed{12}"}'), 12),
    **dict.fromkeys(("{'answer': 12}", "✅ 12", "12✅", "Answer:\xa012", "\ufeff12", "\u200b12\u200b"), 12),
    **dict.fromkeys(("12\u3000", "It is 12 dollars.", "It costs $12 per day", "after 3 days, 12"), 12),
    **dict.fromkeys(("in 3 hours he made 12", "He has 12 cents"), 12),
    "٣": 3,
    **dict.fromkeys(("答案是：１，２３４。", "١٬٢٣٤", "१,२३४"), 1234),
    **dict.fromkeys(("合計１２．５円", "١٢٫٥", "12.5元", '{"answer": 12.5, "confidence": 0.9}', "12½"), 12.5),
    **dict.fromkeys(("답은 ₩1,200입니다", "₩1,200", "1,200원", r"\boxed{\$1{,}200}"), 1200),
    **dict.fromkeys(("1.200,50 €", "€ 1.200,50"), 1200.5),
    **dict.fromkeys(("R$ 50", "百分之50"), 50),
    "20℃": 20,
    **dict.fromkeys(("答案是-5。", "答案是−5", r"\boxed{- 5}", r"\boxed{-\,5}", r"\boxed{$-5$}", "➖5", "‑5"), -5),
    "12万": 120000,
    "1.2万元": 12000,
    "3亿": 300000000,
    "5千": 5000,
    **dict.fromkeys(("5千克", "5千米", r"\boxed{5\,\text{cm}^2}", r"\boxed{5\text{ cm}^{2}}"), 5),
    **dict.fromkeys((r"\boxed{5\,\mathrm{cm}^2}", r"\boxed{5~\text{cm}^2}", r"\boxed{5~cm}"), 5),
    **dict.fromkeys((r"\boxed{5\,\frac{\text{m}}{\text{s}}}", r"\boxed{5\;\mathrm{kg}}", r"\boxed{5\%}"), 5),
    **dict.fromkeys((r"\boxed{x=5}", r"\boxed{x=y=5}", "5️⃣"), 5),
    **dict.fromkeys(("5만원", "5만"), 50000),
    r"\boxed{-12}": -12,
    r"\boxed{ - \frac{1}{2}}": -0.5,
    **dict.fromkeys((r"\boxed{9.8\,\mathrm{m/s^2}}", r"\boxed{9.8\,\text{m}/\text{s}^2}"), 9.8),
    **dict.fromkeys((r"\boxed{3+4=7}", r"\boxed{x = 3 + 4 = 7}"), 7),
    "(that is, 72)": 72,
    # marks of sentences, footnotes, tables, dashes
    **dict.fromkeys(("The answer is 18!", "**18!**", "It is $18! Great", "It's 18!!", "**Answer: 18!**"), 18),
    **dict.fromkeys(("12 [1]", "12[3].", "| 12 |", "| Total | 12 |", "**12** is the answer"), 12),
    **dict.fromkeys(("is –12", "(–12)", "$–12$", "–12"), -12),
    **dict.fromkeys(("1 / 2", "x = 1 / 2"), 0.5),
    # texts around a box
    **dict.fromkeys((r"<answer>\boxed{12}</answer>", r"> \boxed{12}", r"**\boxed{12}**!", r"so:\boxed{12}."), 12),
    **dict.fromkeys((r"\boxed{12} - a dozen", r"\textcolor{red}{\boxed{12}}", r"$x = \boxed{12}$ km"), 12),
    **dict.fromkeys((r"- \boxed{12}", r"\boxed{12}\%", r"\boxed{12} or 12.0", r"\boxed{12}kg"), 12),
    **dict.fromkeys((r"\mathbf{\boxed{12}}", "50 percent of it, 12"), 12),
}

NOTHING = (
    # words, units and scripts that make another number, or several
    *("答案是负5", "零下5度", "マイナス5", "마이너스 5", "5万亿", "5十", "3万5千", "1亿2000万", "5천만"),
    *("2小时30分钟", "2時間30分", "2시간 30분", "5元3角", "2024年5月", "5月3日", "3点30分", "3到5", "3至5", "3～5"),
    *("3〜5個", "3或5", "3个或5个", "3和5", "3、5", "3分之1", "五分之3", "大于5", "5以上", "至少5", "第3", "5的平方"),
    *("5の二乗", "5이상", "5 이상", "3に5", "加5", "5余", "是12，因为9+3", r"\boxed{x = 12 \text{ or } x = 13}"),
    *(r"\boxed{x=12,x=13}", r"\boxed{x=12, y=13}", r"\boxed{x=12 \quad x=13}", r"\boxed{x=12 \\ x=13}"),
    *(r"\boxed{12 \text{ or } 13}", r"\boxed{12/13 \text{ or } 2}", r"\boxed{x=12或x=13}", r"\boxed{\ln 2}"),
    *(r"\boxed{\sqrt 2}", r"\boxed{\sqrt{2}}", r"\boxed{\sin 30}", r"\boxed{\binom{5}{2}}", r"\boxed{(-\infty, 2)}"),
    *(r"\boxed{(2, \infty)}", r"\boxed{[a, 2)}", r"\boxed{\{x, 2\}}"),
    *(r"\boxed{\begin{pmatrix} a \\ 2 \end{pmatrix}}", r"\boxed{\left(-\infty, 2\right]}", r"\boxed{x \ge 5}"),
    *(r"\boxed{x \neq 5}", r"\boxed{\pm 5}", r"\boxed{2i}", r"\boxed{0.\overline{3}}", r"\boxed{a, 2}"),
    *(r"\boxed{5_8}", r"\boxed{\log_{2} 8}", r"\boxed{2 \cup 3}", '{"x": 3, "y": 5}', '{"answer": [1,2]}'),
    *('{"answer": true}', '{"answer": null}', "2 hours 30 minutes", "2 hours and 30 minutes", "2 hours, 30 minutes"),
    *("1 dollar and 25 cents", "two hours 30 minutes", "an hour and 30 minutes", "5 feet 10 inches"),
    *("3 weeks 2 days", "1 year 6 months", "2 Stunden 30 Minuten", "2 heures 30 minutes", "2 horas y 30 minutos"),
    *("2 часа 30 минут", "3 pounds 4 ounces", "3 apples and 5 pears", "3 oder 4", "3 ou 4", "3 или 4"),
    *("12 out of 50", "7 of 10", "x = 12 or x = 13", "x = 12, x = 13", "x=12 and y=13", "$x = 12$ or $x = 13$"),
    *("x_1 = 12, x_2 = 13", r"(-\infty, 2)", "(-∞, 2]", "[2, ∞)", "(x, 2)", "(a,2)", r"(2,\infty)", r"[2, \infty)"),
    *("(-oo, 2)", r"x \in [2, b]", "ln 2", r"\sqrt 2", r"x \neq 5", "5 Millionen", "5 миллионов", "5 lakh"),
    *("минус 5", "menos 5", "1e400", "1e-400", "3➕4", "The answer is 12 !", "a week 12", "", "no number", "five"),
    *("∞", "nan", "inf", "-"),
    # tuples, lists, sets
    *("(1,2)", "(1, 2)", "[3, 5]", "{1,2}", "1, 2", "1, 2, 3", "1; 2", "1,2", "(1,234)", "3 and 5", "3, and 5"),
    *("3 & 5", "1 2", "1 234", "1 234 567", "555 123", "(1,2,3)", r"\boxed{1,2}", r"\boxed{(1,2)}", r"\boxed{1, 2}"),
    # choices and ranges
    *("3 or 5", "3, or 5", "5 or more", "5 or so", "3-5", "3–5", "3 - 5", "3 — 5", "3 to 5", "from 3 to 5", "3..5"),
    *("between 3 and 5", "3~5", "3 through 5", "3 vs 5", "3…5", "5 (or 6)", "5 (to 6)", "5 [or 6]", "5 km or 6 km"),
    *("5 kg (or 6 kg)", "5 m, or 6", "5 % or 6 %", "5 °C to 6 °C"),
    # expressions and bounds
    *("7-3", "7+3", "7*3", "7 - 3", "7 + 3", "7 * 3", "7 × 3", "2 x 3", "7x3", "x + 5", "5 + x", "5 x", "x-5", "5x"),
    *("2^3", "2**3", "x^2", "2³", "5!", "5 !", "√2", "2√2", "2π", "2 pi", "5 squared", "> 5", ">5", "< 5", "<=5"),
    *("≤ 5", "3 & 5", "x ≥ 5", "±5", "5 +/- 1", "± 5", "!= 5", "≠5", "5+", "- 5", "the answer - 5", "5 * y", "f(5)"),
    *("7=3+4", "x > 5", "|5|", "10^3^2", "1e3.5", "1e", "2e", "5 and a half", "5 and three quarters"),
    # words that change a number, and quantities of several numbers
    *("it is (minus 5)", "(- 5)", "minus 5", "it is negative 5", "7 minus 3", "2 plus 3", "3 times 4", "5 ft 10 in"),
    *("5 ft, 10 in", "2 h 30 min", "3 kg 200 g", "5 hundred thousand", "2 million 500 thousand", "5 thousand 3"),
    *("3 : 4",),
    # dates, times, ratios, versions, addresses
    *("2024-05", "2024-05-01", "12/25/2024", "01.02.2024", "May 5, 2024", "May 5", "5 May", "May 2024", "10:30"),
    *("3:1", "it is (May 5)", "1.2.3", "v1.2", "1.234.567", "192.168.0.1", "555-1234", "+1 555 123 4567", "10:30:15"),
    *("2/3/4", "3/0"),
    # decimal commas and groups that are none
    *("0,5", "3,14", "1234,5", "1,23", "1,2345", "1,00,000", "12,34,567", "0,123", "1,234,56", ",5", "1_0", "1,,000"),
    # letters and names
    *("GPT-4", "H2O", "A4", "COVID-19", "1st", "2nd", "5th", "0x1F", "0b101", "5k", "5M", "5B", "5 k", "5 M", "5 bn"),
    *("2h30", "3D", "x2", "5a", "CO2", "e5", "1e999", "($5)", "--5", "+-5", "1.5/2"),
    # items of lists, and boxes
    *("1. Add", "1. Add\n2. Take away", "2) Take away", "(2) Take away", r"\boxed{12", r"\boxed{x}", r"\boxed{}"),
    *(r"\boxed{3\sqrt{2}}", r"\boxed{2\pi}", r"\boxed{3!}", r"\boxed{x} 5", r"\frac{a}{2}", r"\frac{1}{x}"),
    *(r"\frac{1}{2}x", r"\boxed{2^{10}}", r"\boxed{[1,2]}", r"\boxed{5 \pm 1}", r"\boxed{1 \text{ or } 2}"),
    *(r"\boxed{\frac{1}{0}}", r"\boxed{-}"),
    # spelled operations, scales, bounds and denials
    *("half of 12", "a third of the 12", "twice 12", "double 12", "the square root of 12", "the opposite of 12"),
    *("12 divided by four", "12 times five", "five percent of 12", "12 percent of six", "12 modulo five"),
    *("12 plus one", "12 Mio. Euro", "12 Mrd", "12 Mrd. Euro", "12 quadrillion", "12 million-dollar", "12 hundreds"),
    *("12 gross", "12 score", "12 point five", "12 dozens", "12 hundred five", "12 thousand and six"),
    *("12 quintillion", "12 grand", "less than 12", "more than 12", "no more than 12", "at least 12", "at most 12"),
    *("over 12", "up to 12", "not 12", "isn't 12", "it is not equal to 12", "never 12", "12 is wrong"),
    *("12 is not right", "12 isn't it", "12 to the 3", "12 to the power of 3", "12 to the power three"),
    *("negative 12", "5! = 120!", "$5!$", "x = 5!", "less than or equal to 12", "instead of 12", "a minimum of 12"),
    *("12 would be wrong", "12 at most", "12 minimum", "12 and above", "12 halves", "12 thousandths"),
    *("12 hundredths of it", "12 tops", "anything except 12"),
    # parts of an expression around a box
    *(r"-\boxed{12}", r"x = - \boxed{12}", r"2\boxed{12}", r"\sqrt{\boxed{12}}", r"\boxed{12}^2", r"\boxed{12}00"),
    *(r"\boxed{12} million", r"\boxed{12}\text{ million}", r"$\boxed{12}$ thousand", r"\frac{1}{\boxed{12}}"),
    *(r"\boxed{12}.5", r"\boxed{12} + 3", r"3 \times \boxed{12}", r"x^{\boxed{12}}", r"\boxed{12}\pi"),
    *(r"\boxed{12}x", r"\boxed{12} k", r"\boxed{12} is wrong", r"\boxed{12}/5", r"$\boxed{5}!$", r"\pm\boxed{12}"),
    *(r"x > \boxed{12}", '{"answer": 3, "answer": 5}', '{"x": 12, "x": 12}'),
)


REMARKS = (
    *("(see Figure 3)", "(Figure 3)", "(Fig. 3)", "(see Table 4).", "(eq. 5)", "(Equation 3)", "(p. 45)", "(note 2)"),
    *("(from step 3)", "(using (3))", "(see section 2.1)", "(by theorem 4)", "(line 7)", "(cf. [7])", "(pp. 45-47)"),
    *("(steps 2 and 3)", "(see [1, 2])", "(rounded to 2 decimals)", "(to 3 significant figures)", "(in 2024)", "[3]"),
    *("(as of 2023)", "(correct to 1 decimal place)", ", see Figure 3", " - see equation 3", ", as shown in Table 4."),
    *(" by theorem 4", ", from step 3", ", according to [7]", " (that is, 12.0)", " (which is 12)", " (Case 2)**"),
)
UNCLEAR = (
    *("12 (3 each)", "12 apples (3 per child)", "12 cm (4.7 in)", "12 (mod 7)", "12 (base 8)", "12 (not 13)"),
    *("12 km in 1999", "12 in 2024.", "It was 12 since 2019", "12 (in base 8)", "12 (exactly 11.8)", "See Figure 3"),
    *("see also [7]", "12 (3 of them in 2024)", "12 (about 13 in total)", "12 (or 13)"),
)


def test_where_a_number_comes_from_is_no_number() -> None:
    for before, remark in product(("", "The answer is ", "We have 3 of 4.\nSo x = "), REMARKS):
        between = "" if remark[0] in " ," else " "
        assert last_number(f"{before}12{between}{remark}") == 12, (before, remark)


def test_a_remark_with_another_value_makes_it_unclear_which_is_meant() -> None:
    assert [text for text in UNCLEAR if last_number(text) is not None] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is on page 45", 45),
        ("The answer is step 3.", 3),
        ("The answer is in row 7", 7),
        ("He was born in 1999", 1999),
        ("With 5 more years he retires in 2000", 2000),
        ("There are 4 children. Each gets some (12)", 12),
        ("a town (population 12)", 12),
        ("x = 3 (so 2x = 6)", 6),
        ("5 boxes (in total 60)", 60),
        ("see step 2: 12", 12),
    ],
)
def test_a_number_that_is_the_answer_itself_is_read_in_a_remark_too(text: str, value: int) -> None:
    assert last_number(text) == value


def test_formats_that_mean_a_number() -> None:
    for text, value in NUMBERS.items():
        assert last_number(text) == pytest.approx(value, rel=1e-12), text


def test_formats_that_mean_nothing() -> None:
    assert [text for text in NOTHING if last_number(text) is not None] == []


def test_numbers_that_python_writes_are_read_back() -> None:
    for value in (0.1, 1e-07, 1e22, 123456789.25, -3, 2**70, 1 / 3):
        found = last_number(str(value))
        assert found is not None
        assert float(found) == value


def test_numbers_are_exact() -> None:
    assert last_number("12345678901234567890") == 12345678901234567890
    assert last_number("12345678901234567891.25") == Fraction(49382715604938271565, 4)
    assert last_number("9" * 5000) == 10**5000 - 1
    assert last_number("9" * 20_000) is None
    assert last_number("1/3") == Fraction(1, 3)
    assert last_number("1.6e-19") == Fraction(16, 10**20)


def test_an_ambiguous_end_is_no_number_whatever_stands_before_it() -> None:
    sample = Sample("p", "The answer is 5. It is 5-6", {"prompt": "p", "answer": 5}, 0, 0, "stop", 1)
    assert numeric()(sample) == 0
    with golden.raises(RewardError, match=r"'\(1,2\)'"):
        numeric()(Sample("p", "12", {"prompt": "p", "answer": "(1,2)"}, 0, 0, "stop", 1))


@pytest.mark.parametrize("piece", ["9", "1,", "1,234", "(", "{", "\\boxed{", "\\frac{1}", "10^", "- ", "1 ", "\n1. "])
def test_long_texts_take_milliseconds(piece: str) -> None:
    began = time.process_time()
    last_number(piece * 5000)
    assert time.process_time() - began < 1
