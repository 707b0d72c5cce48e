"""Wording of the generated word problems: sentences, names and things.

Each list of sentences has at least 20 that start with different words, so that a model trained on
the corpus is truly undecided there (24 equally likely tokens of 4,096 have a normalised entropy of
0.38). Openings of first and middle lines continue predictably for about seven words, so that a
window of six can pass after the choice; openings of last lines are short, so that it cannot.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ana Ben Cara Dan Ella Finn Gina Hugo Iris Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina "
    "Vera Will Zoe Adam Bella Carl Diana Emil Flora Greg Helen Ivan Julia Karl Lucy Mark Nina"
)

THINGS = _words(
    "apples books cards coins marbles pens stamps shells stickers stones balls beads buttons "
    "cakes cups eggs flowers keys lemons nuts oranges pears plums rings tickets toys"
)

BOXES = _words("boxes bags crates baskets jars trays packs chests")
COLOURS = _words("red blue green yellow white black brown silver")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
GOODS = _words("hat pen cake book toy lamp cup map kite drum ball ring scarf bag clock")

# The first line of a solution; free, says nothing about what follows.
STARTS = (
    "Let us go through the story one piece at a time.",
    "We take the story in small steps, one after another.",
    "To solve this, write down what is known and build on it.",
    "First read the numbers off and then put them together.",
    "Here the best way is to move slowly from what is known.",
    "Start with the facts and work towards what is asked.",
    "Begin with what is given and go on from there.",
    "This can be done by keeping track of every number.",
    "Every number we need is in the story or follows from it.",
    "Nothing is hidden, so we can just follow the story along.",
    "All the facts are there, so we only need to combine them.",
    "One careful step after the other leads to the answer.",
    "Step by step, the amounts in the question can be found.",
    "Reading the question again shows which amounts we need.",
    "With the numbers above we can find each missing amount.",
    "From the facts above we can find what we need in order.",
    "Since each amount is known or follows, we can work it out.",
    "The plan is simple: find each amount and then finish.",
    "In problems like this it helps to find the parts first.",
    "Before the final answer we need the amounts along the way.",
    "Solving this takes a few short sums, so here they are.",
    "Look at what we know and turn it into short sums.",
    "Our goal is clear, so we set out the sums one by one.",
    "Think of the story as a chain and follow each link.",
    "Some amounts are given and the others follow from them.",
    "By writing short sums we reach the answer without trouble.",
    "Now we turn the words into sums and keep the results.",
    "You can follow the sums below to see how it works out.",
    "Working carefully, we can find the answer in a few sums.",
    "It helps to write each sum down before moving on.",
    "What we need first are the amounts that the story leaves out.",
    "Each sum below gives one amount that the question needs.",
)

# Before a sum in the middle.
MIDDLES = (
    "Next we look at one more of the amounts:",
    "Then it is time for the following sum:",
    "Now the next sum can be written down:",
    "After this we move on to another sum:",
    "Going on, there is one more sum to do:",
    "Another amount follows from what we have:",
    "Also needed on the way is this amount:",
    "Continuing, we write down the following sum:",
    "That lets us go on with this sum:",
    "With this settled, the next sum is short:",
    "Proceeding like this, we write one more sum:",
    "Further along the way comes this sum:",
    "Moving on, we come to the following amount:",
    "Knowing this, we can find one more amount:",
    "Once that is done, we go on like this:",
    "Having that, we can do one more sum:",
    "Keep this in mind and go on like this:",
    "Following the story, we find one more amount:",
    "Again a short sum gives what we need:",
    "Still missing is the amount in this sum:",
    "There is one more amount to find here:",
    "Using what we have, we can go on:",
    "Right after that comes the following short sum:",
    "Meanwhile the story goes on, and so do we:",
    "Carrying on, the sum that follows is easy:",
    "More can be said with the next sum:",
)

# Before the last sum. Short on purpose: whoever says "finally" one sum too early or too late is
# bound to go wrong within the next few words, where a window still sees it.
ENDS = (
    "Finally,",
    "Lastly,",
    "In the end,",
    "Thus,",
    "Hence,",
    "Therefore,",
    "To finish,",
    "At last,",
    "Closing,",
    "Overall,",
    "Ultimately,",
    "Accordingly,",
    "Concluding,",
    "Wrapping up,",
    "For the answer,",
    "As asked,",
    "Last of all,",
    "Only this is left:",
    "Answering,",
    "Ending here,",
    "Summing up,",
    "Put together,",
    "Consequently,",
    "Eventually,",
    "Completing this,",
    "Done with that,",
)

# A plan binds all that follows: one change after another ...
PLAN_STEPWISE = (
    "Let us make the changes one at a time.",
    "Step by step, each change is made to what is there.",
    "One after the other, we follow every change in turn.",
    "Take each change by itself and keep the new amount.",
    "Go through the changes singly and note what results.",
    "Each change is worked into the amount as it comes.",
    "Follow the amount as it changes and never jump ahead.",
    "Here we track the amount through every single change.",
    "Starting from the first amount, change it bit by bit.",
    "Slowly, we let the amount change once for each event.",
    "Every change gets its own sum on the running amount.",
    "We keep a running amount and update it each time.",
)
# ... or the changes gathered before the amount is touched.
PLAN_GATHERED = (
    "All changes are put together before touching the amount.",
    "First gather the changes and only then use the amount.",
    "To save work, collect the changes into one number.",
    "Before anything else, we combine the changes themselves.",
    "It is quicker to join the changes and apply them once.",
    "Combine the changes first and leave the amount for later.",
    "The changes can be bundled and applied at the end.",
    "Put the changes into one heap and apply it last.",
    "Gather up the changes so that one sum finishes it.",
    "By joining the changes first we touch the amount once.",
    "Leave the amount alone until the changes are joined.",
    "Together the changes make one number, so find it first.",
)
# The same for equal groups: each kind by itself, or the groups counted first.
PLAN_EACH_KIND = (
    "Let us fill each kind by itself and join them later.",
    "Each colour gets a sum of its own before we join them.",
    "One colour at a time, we find what is inside.",
    "We treat the two colours apart and add afterwards.",
    "Separate sums for the two colours come before the total.",
    "Take the colours apart and find what each one holds.",
    "First find what every colour holds and then join.",
    "Start with the contents of one colour, then the other.",
    "Look at the colours singly and put them together last.",
    "Every colour is worked out alone before we add.",
    "Working colour by colour, we find the contents.",
    "Here the contents of each colour are found on their own.",
)
PLAN_COUNT_FIRST = (
    "All of them hold the same, so count them first.",
    "Since they are all alike, we first count them together.",
    "The colour makes no difference, so count everything first.",
    "Forget the colours and find how many there are.",
    "To save a sum, we count both colours together.",
    "Because each one holds the same, we join them at once.",
    "It is quicker to count all of them before filling.",
    "Equal contents mean that their number comes first.",
    "As they hold the same, find the number of them first.",
    "Counting both colours together makes this one shorter.",
    "Together the colours are one group, so count it first.",
    "Join the colours into one group and count that first.",
)

# How a sum about a person is put; the name comes before or after the numbers it binds.
PERSON_SUMS = (
    "{name} has {sum} {things}.",
    "{name} must have {sum} {things}.",
    "{sum} {things} belong to {name}.",
    "{sum} is how many {things} {name} has.",
    "for {name} it is {sum} {things}.",
    "we get {sum} {things} for {name}.",
)
PLAIN_SUMS = (
    "this is {sum}.",
    "we get {sum}.",
    "it is {sum}.",
    "{sum}.",
    "the sum is {sum}.",
    "that makes {sum}.",
)
KIND_SUMS = (
    "the {colour} ones hold {sum} {things}.",
    "{colour}: {sum} {things}.",
    "{sum} {things} are in the {colour} ones.",
    "in the {colour} ones are {sum} {things}.",
)
