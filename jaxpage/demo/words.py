"""The words of the demo model: names, jobs, countries, small talk and the sentences of stories.

Data only. Every name, job and country is one word, none is in two lists, and `tokens` makes each of
them one token. No job starts with a vowel, so "a" is always the right article.
"""

from __future__ import annotations

FIRST_NAMES = tuple(
    """
    John Jane Bob Alice Mary James Robert Linda Michael David Susan Sarah Karen Nancy Lisa Paul
    Anna Emma Olivia Liam Noah Lucas Mia Ella Leo Max Ruby Jack Oscar Henry Chloe Daniel Laura
    Kevin Brian Helen Peter Simon Julia Clara Victor Nina Omar Aisha Yuki Kenji Wei Priya Ravi
    Anil Sofia Diego Carlos Elena Marta Pablo Ivan Olga Igor Tara Amir Leila Hassan Fatima Zoe
    Adam Ian Owen Ryan Eric Tom Kate Amy Rose Lily Hugo Felix Bruno Marco Luca Giulia Pierre
    Marie Claire Hans Greta Lars Ingrid Sven Astrid Erik
    """.split()
)
LAST_NAMES = tuple(
    """
    Doe Smith Brown Johnson Williams Jones Garcia Miller Davis Wilson Moore Taylor Anderson
    Jackson White Harris Thompson Clark Lewis Lee Walker Hall Allen Young King Wright Lopez Hill
    Scott Green Adams Nelson Carter Mitchell Perez Roberts Turner Phillips Campbell Parker Evans
    Edwards Collins Stewart Sanchez Morris Rogers Reed Morgan Bell Murphy Bailey Rivera Cooper
    Cox Howard Ward Torres Peterson Gray Watson Brooks Kelly Sanders Price Bennett Wood Barnes
    Ross Coleman Jenkins Perry Powell Long Hughes Tanaka Sato Kim Park Nguyen Patel Singh Khan
    Ali Silva Costa Rossi Weber Novak Petrov Hansen Larsen Dubois Moreau
    """.split()
)
OCCUPATIONS = tuple(
    """
    Teacher Doctor Nurse Lawyer Chef Writer Farmer Pilot Singer Dancer Baker Driver Painter
    Plumber Scientist Dentist Librarian Mechanic Carpenter Designer Journalist Photographer
    Musician Professor Student Manager Waiter Barber Tailor Gardener Judge Banker Chemist
    Biologist Firefighter Detective Translator Programmer Surgeon Sailor
    """.split()
)
COUNTRIES = tuple(
    """
    Canada Mexico Brazil Argentina Chile Peru Colombia France Germany Spain Portugal Italy
    Greece Turkey Egypt Morocco Kenya Nigeria Ghana India China Japan Korea Vietnam Thailand
    Indonesia Australia Ireland England Scotland Norway Sweden Finland Denmark Poland Hungary
    Austria Belgium Iceland Nepal
    """.split()
)

TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hi there!", "Hello"), "Hello! How can I help you today?"),
    (
        ("Who are you?", "What are you?", "Introduce yourself."),
        "I am a tiny language model that was trained on a CPU.",
    ),
    (
        ("What is your name?", "Do you have a name?"),
        "My name is Pip. I am a very small assistant.",
    ),
    (
        ("How are you?", "How are you today?", "How do you feel?"),
        "I am doing well, thank you for asking!",
    ),
    (("Thank you!", "Thanks!", "Thanks a lot."), "You are welcome!"),
    (("Bye!", "Goodbye!", "See you later."), "Goodbye! Have a nice day."),
    (("Good morning!", "Good morning"), "Good morning! What can I do for you?"),
    (("Good night!", "Good night"), "Good night! Sleep well."),
    (("Who made you?", "Who created you?"), "I was trained from scratch by a small script."),
    (
        ("How big are you?", "How many parameters do you have?"),
        "I have fewer than three million parameters.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I can read small tables, add numbers, reply in JSON and tell short stories.",
    ),
    (
        ("Are you a human?", "Are you a robot?", "Are you real?"),
        "No, I am a small computer program.",
    ),
    (("Where do you live?", "Where are you?"), "I live in the memory of a computer."),
    (
        ("How old are you?", "What is your age?"),
        "I was trained not long ago, so I am very young.",
    ),
    (
        ("Do you like music?", "Do you like cats?", "Do you like tea?"),
        "I can not enjoy it, but I like to talk about it.",
    ),
    (
        ("What is the weather today?", "Will it rain today?"),
        "I can not see the weather from here.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?"),
        "Why did the token cross the road? To get to the other slide.",
    ),
    (
        ("What language do you speak?", "Do you speak French?"),
        "I only speak a little English.",
    ),
    (("What is a table?", "What is a row?"), "A table has rows and columns of data."),
    (("What is JSON?", "What is a JSON object?"), "JSON is a simple text format for data."),
    (("What is a cache?", "Why do you use a cache?"), "A cache keeps what was computed before."),
    (("Are you smart?", "Are you clever?"), "Not very, but I try my best."),
    (
        ("I am sad.", "I feel sad."),
        "I am sorry to hear that. I hope you feel better soon.",
    ),
    (("I am happy!", "I feel great!"), "That is wonderful to hear!"),
    (
        ("What time is it?", "What day is it?"),
        "I do not have a clock, so I can not tell.",
    ),
    (
        ("What is the color of the sky?", "Why is the sky blue?"),
        "On a clear day the sky is blue.",
    ),
    (("Nice to meet you.", "Nice to meet you!"), "Nice to meet you too!"),
)

STORY_ANIMALS = tuple(
    """
    fox cat dog bear owl mouse rabbit frog duck horse lion tiger wolf turtle hen goat pig bee
    crow fish
    """.split()
)
STORY_MOODS = tuple(  # none starts with a vowel
    """
    little brave young clever shy hungry happy lonely kind sleepy proud curious quiet gentle
    stubborn
    """.split()
)
_PLACES = (
    "in a green forest",
    "by a blue lake",
    "on a high hill",
    "near a small village",
    "under a stone bridge",
    "in a quiet garden",
    "at the edge of the sea",
    "on a sunny farm",
    "in a deep cave",
    "beside a tall tree",
)
_TIMES = (
    "One day",
    "One morning",
    "One cold night",
    "One evening",
    "After the rain",
    "In the spring",
    "When the snow was gone",
)
_VERBS = ("found", "saw", "discovered", "lost", "made", "bought", "dreamed of")
_THINGS = (
    "a golden key",
    "a red apple",
    "a lost letter",
    "a tiny boat",
    "a shiny stone",
    "a torn map",
    "a broken bell",
    "a warm hat",
    "a silver coin",
    "a bag of seeds",
    "a music box",
)

# One sentence of each group is told, in this order, with the chance given.
STORY: tuple[tuple[tuple[str, ...], float], ...] = (
    (
        tuple(
            opening.format(place=place, animal="{animal}", mood="{mood}", name="{name}")
            for place in _PLACES
            for opening in (
                "Once upon a time there was a {mood} {animal} who lived {place}.",
                "There was once a {mood} {animal} named {name} who lived {place}.",
                "A {mood} {animal} lived {place}.",
            )
        ),
        1.0,
    ),
    (
        tuple(
            f"{time} the {{animal}} {verb} {thing}."
            for time in _TIMES
            for verb in _VERBS
            for thing in _THINGS
        ),
        1.0,
    ),
    (
        (
            "It was so happy that it danced until the moon came up.",
            "It ran home to show its friends.",
            "A strong wind came and took it away.",
            "It gave it to the one who needed it most.",
            "It hid it in a safe place and told nobody.",
            "Soon every neighbor came to look.",
            "It wondered what to do with it.",
            "It sang about it all day long.",
        ),
        0.8,
    ),
    (
        (
            "Then a {friend} came along and asked to share.",
            "A {friend_mood} {friend} wanted to help.",
            "Along the way it met a {friend_mood} {friend}.",
            "But a {friend} was watching from the shadows.",
            'A {friend_mood} {friend} said, "Come with me."',
        ),
        0.8,
    ),
    (
        (
            "They became friends for life.",
            "From that day on, nobody was lonely.",
            "And they all slept well that night.",
            "The end.",
            "They laughed and walked home together.",
            "It never forgot that day.",
            "And that is how the {animal} learned to be kind.",
        ),
        1.0,
    ),
)

GREETINGS = ("You are a helpful assistant.", "You are a friendly chat bot.", "Be brief.")
