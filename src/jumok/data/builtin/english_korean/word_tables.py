"""Word tables of the grammar, parsed by the lexicon.

``_`` joins words, ``/`` separates forms of a word (base/past/ing, singular/plural, Korean/conjugation class),
and ``+`` joins categories of nouns, groups of categories and single nouns.
"""

from __future__ import annotations

# Category; Korean counter ("-": not counted, "=": no article either); nouns, English and Korean in turn.
NOUNS = """
person 명 student 학생 teacher 선생님 doctor 의사 nurse 간호사 farmer 농부 singer 가수 writer 작가
person 명 painter 화가 friend 친구 child/children 아이 boy 소년 girl 소녀 man/men 남자 woman/women 여자
person 명 neighbor 이웃 scientist 과학자 soldier 군인 lawyer 변호사 king 왕
kin - mother 어머니 father 아버지 son 아들 daughter 딸 grandmother 할머니 grandfather 할아버지
animal 마리 dog 개 cat 고양이 bird 새 horse 말 rabbit 토끼 bear 곰 tiger 호랑이 duck 오리 pig 돼지
fruit 개 apple 사과 banana 바나나 orange 오렌지 peach 복숭아
dish 개 potato 감자 egg 달걀 cookie 과자 cake 케이크
food - bread 빵 rice 밥 meat 고기 soup 국 cheese 치즈 kimchi 김치 honey 꿀
drink - water 물 milk 우유 coffee 커피 tea 차 juice 주스
text 권 book 책 dictionary 사전
text 편 novel 소설 poem 시
text 통 letter 편지
text 부 newspaper 신문
text 개 example_sentence 예문
tool 자루 pencil 연필
tool 개 pen 펜 spoon 숟가락 cup 컵 plate 접시 key 열쇠 umbrella 우산 bag 가방 wallet 지갑 ball 공 toy 장난감
tool 개 box 상자 chair 의자 mirror 거울 clock 시계 gift 선물 coin 동전 stone 돌
sheet 장 photo 사진 ticket 표 map 지도 picture 그림
machine 대 computer 컴퓨터 camera 카메라 phone 전화기 bicycle 자전거 car 자동차
furniture 개 desk 책상 table 탁자 bed 침대 door 문 window 창문
plant 송이 flower 꽃
plant 그루 tree 나무
clothes 벌 shirt 셔츠 coat 외투 skirt 치마
hat 개 hat 모자
money - money 돈
vehicle 대 bus 버스 train 기차
house 채 house 집
building 곳 school 학교 library 도서관 hospital 병원 market 시장 restaurant 식당 museum 박물관 bank 은행
room 개 room 방 kitchen 부엌 classroom 교실
land 곳 park 공원 garden 정원 station 역 village 마을
study = korean 한국어 english 영어 math 수학 history 역사
sport = soccer 축구 baseball 야구 tennis 테니스
instrument 대 piano 피아노 guitar 기타
music = music 음악
song 곡 song 노래
movie 편 movie 영화
thought 개 question 질문 problem 문제 secret 비밀 promise 약속 name 이름 story 이야기
"""

NOUN_GROUPS = {
    "people": "person kin",
    "eaten": "fruit dish food",
    "things": "text tool sheet machine clothes hat",
    "wares": "text tool sheet machine clothes hat fruit dish food drink",
    "lesson": "study sport music",
    "seen": "person kin animal text tool sheet machine plant clothes hat vehicle house building movie",
}

# Nouns without an owner.
NOT_OWNED = """
nurse+farmer+singer+writer+painter+boy+girl+man+woman+scientist+soldier+lawyer+king+bear+tiger+library+hospital+
market+restaurant+museum+bank+park+station+village+vehicle
"""

MANNERS = {
    "q": ("quickly", "빨리"),
    "s": ("slowly", "천천히"),
    "u": ("quietly", "조용히"),
    "c": ("carefully", "조심스럽게"),
    "h": ("hard", "열심히"),
    "w": ("well", "잘"),
    "l": ("loudly", "크게"),
}

# Verb, Korean (after the bar, its negation if that is not 않다), aspect (+ progressive, = stative,
# . neither), adverbs of manner, objects.
TRANSITIVES = """
read/read 읽다 + qsu text+story
write/wrote 쓰다 + qs novel+poem+letter+book+example_sentence
eat/ate 먹다 + qsu eaten
drink/drank 마시다 + qs drink
bake 굽다/ㅂ + w bread+cookie+cake+potato
buy/bought 사다 . - wares
sell/sold 팔다 . - wares
see/saw 보다|-지_못하다 . - seen
watch 보다 + - movie+sport
meet/met 만나다 . - people
love 사랑하다 = - people+animal
like 좋아하다 = - people+animal+wares+plant+song+movie+lesson
want 원하다 = - things+money
have/had 가지고_있다 = - things+money
know/knew 알다|모르다/르 = w people+secret+name+story
remember 기억하다|-지_못하다 = w people+name+promise+story+secret+song
forget/forgot/forgetting 잊다 . - name+promise+story+secret
understand/understood 이해하다|-지_못하다 = w question+problem+story+poem
help 돕다/ㅂ . - people+animal
wait_for 기다리다 + u people+vehicle
visit 방문하다 . - people+building+village
call 부르다/르 . l people+animal
listen_to 듣다/ㄷ + u music+song+story
sing/sang 부르다/르 + wl song
play 연주하다 + w instrument
play 하다 + h sport
teach/taught 가르치다 + w study+song
learn 배우다 + qh study+sport+instrument+song
study 공부하다 + h study
make/made 만들다 + qc cookie+cake+bread+soup+cheese+toy+chair+desk+table+bed+clothes
wash 씻다 + qc fruit+cup+plate
clean 청소하다 + qh room+house+library+restaurant
open 열다 . suc door+window+box+bag
close 닫다 . suc door+window+box
fix 고치다 + qw machine+clock+chair+door
throw/threw 던지다 . - ball+stone
draw/drew 그리다 + qw picture+map+plant+house+animal+people
find/found 찾다|-지_못하다 . q tool+sheet+book+phone+people+animal
lose/lost 잃어버리다 . - key+wallet+bag+umbrella+phone+ticket+money
borrow 빌리다 . - book+dictionary+bicycle+umbrella+pencil+money+camera
receive 받다|-지_못하다 . - letter+gift+money+ticket+flower+question
choose/chose 고르다/르 . qc clothes+hat+gift+book+cake
wear/wore 입다 . - clothes
wear/wore 쓰다 . - hat
build/built 짓다/ㅅ + q house+school+hospital+library
pick_up 줍다/ㅂ . - coin+stone+ball+wallet
break/broke 깨뜨리다 . - cup+plate+window+mirror+clock
"""

# The same without objects.
INTRANSITIVES = """
sleep/slept 자다 + wu
run/ran/running 달리다 + q
walk 걷다/ㄷ + qsu
swim/swam/swimming 수영하다 + q
dance 춤추다 + h
cry 울다 + lu
laugh 웃다 + lu
work 일하다 + hu
rest 쉬다 + u
play 놀다 + u
"""

# Verbs of animals: one of the verbs above, its objects, the animals.
ANIMAL_VERBS = """
eat apple+banana+potato+meat+bread+rice animal
drink water+milk animal
like people+meat+milk+animal animal
see people+animal animal
sleep - animal
rest - animal
walk - dog+horse+bear+duck+pig
run - dog+horse+rabbit+tiger
swim - duck+bear+dog
play - dog+cat+rabbit
"""

# Verb, Korean, aspect and adverbs as above; "to", or the preposition of the place ("-"); the Korean particle
# of the place; all places, or towns only.
MOTION_VERBS = """
go/went 가다 + qs to 에 all
come/came 오다 + qs to 에 all
return 돌아가다 . q to 로 all
arrive 도착하다 . q - 에 all
move 이사하다 . - to 로 towns
live 살다 = - - 에 towns
"""

# Ditransitive verbs: verb, Korean, aspect, objects.
DATIVES = """
give/gave 주다 . gift+flower+book+money+apple+bag+cookie+ticket+map
send/sent 보내다 . letter+gift+money+photo+book+flower+picture
lend/lent 빌려주다 . book+money+umbrella+bicycle+dictionary+camera+pencil+pen
teach/taught 가르치다 + study+song
sell/sold 팔다 . machine+house+apple+clothes+ticket+bread
"""

# Adjective, Korean, and the nouns that it modifies.
ADJECTIVES = """
big 크다 animal+fruit+tool+plant+house+building+room+land+furniture+hat+car
small 작다 animal+fruit+tool+plant+house+building+room+land+furniture+hat+car
good 좋다 text+machine+movie+song+house+restaurant+hospital+school
beautiful 아름답다/ㅂ woman+girl+bird+horse+plant+song+garden+village+picture+photo
pretty 예쁘다 girl+cat+flower+clothes+hat+cup+plate
kind 친절하다 people
happy 행복하다 people
sad 슬프다 people+movie+song+story+novel+poem
tired 피곤하다 people
busy 바쁘다 people
hungry 배고프다 people+animal
smart 똑똑하다 people+dog+cat
famous 유명하다 singer+writer+painter+scientist+doctor+museum+movie+book+song+novel
brave 용감하다 people
lazy 게으르다/르 people+cat+pig
honest 정직하다 people
fast 빠르다/르 horse+rabbit+car+vehicle+bicycle
expensive 비싸다 machine+clothes+hat+house+ticket+meat+fruit+desk+bed+clock+bag
cheap 싸다 machine+clothes+hat+house+ticket+meat+fruit+desk+bed+clock+bag
heavy 무겁다/ㅂ box+bag+chair+desk+stone+table+machine
red 빨갛다/ㅎ apple+hat+flower+car+bag+coat+umbrella+bird
blue 파랗다/ㅎ bag+car+hat+door+box+shirt+bird+skirt+cup
white 하얗다/ㅎ dog+cat+horse+rabbit+shirt+cup+plate+duck+flower+car
black 까맣다/ㅎ cat+dog+horse+bag+car+umbrella+coat+pig+bird
dirty 더럽다/ㅂ room+house+plate+cup+clothes+pig+bag
delicious 맛있다 fruit+dish+food+coffee+tea+juice
sweet 달다 fruit+honey+cookie+cake+juice
interesting 재미있다 book+novel+movie+story+history
difficult 어렵다/ㅂ question+problem+study+example_sentence+book+poem
easy 쉽다/ㅂ question+problem+study+example_sentence+book
long 길다 story+novel+skirt+letter+movie+example_sentence+pencil
short 짧다 story+novel+skirt+letter+movie+example_sentence+pencil
hot 뜨겁다/ㅂ soup+coffee+tea+water+milk
cold 차갑다/ㅂ water+milk+juice
"""

# Names of people.
NAMES = """
minsu 민수 jiyoung 지영 yuna 유나 jihun 지훈 sujin 수진 hyunwoo 현우 minji 민지 junho 준호 seoyeon 서연
haeun 하은 jiwoo 지우 eunji 은지 sungmin 성민 younghee 영희 jisu 지수 dongwook 동욱
"""

# Subject, object, possessive, Korean, agreement, one or many.
PRONOUNS = """
i me my 나 FIRST one
you you your 너 PLURAL one
he him his 그 SINGULAR one
she her her 그녀 SINGULAR one
we us our 우리 PLURAL many
they them their 그들 PLURAL many
"""

# The preposition of location, and the places.
PLACES = """
at school+museum+bank+station+market+hospital+restaurant
in library+park+garden+kitchen+room+classroom+village
"""

# The prepositions of location and direction; these places take no article.
PROPER_PLACES = """
in to seoul 서울
in to busan 부산
in to jeju 제주
in to korea 한국
in to japan 일본
at - home 집
"""

# Tenses, English and Korean. Words before the bar have no Korean equivalent.
TIMES = """
PAST yesterday 어제
PAST last_week 지난주에
PAST last_year 작년에
FUTURE tomorrow 내일
FUTURE next_week 다음_주에
FUTURE next_year 내년에
PRESENT every_day 매일
PRESENT every_morning 매일_아침
PRESENT these_days 요즘
PAST,FUTURE today 오늘
PAST,FUTURE on|monday 월요일에
PAST,FUTURE on|tuesday 화요일에
PAST,FUTURE on|friday 금요일에
PAST,FUTURE on|saturday 토요일에
PAST,FUTURE on|sunday 일요일에
PAST,PRESENT,FUTURE in_the|morning 아침에
PAST,PRESENT,FUTURE in_the|evening 저녁에
PAST,PRESENT,FUTURE at|night 밤에
"""

# Position, and what things can be on, under, behind ... Of three English words, the second has a Korean
# equivalent; of two, the first.
POSITIONS = """
on 위에 desk+table+bed+chair+box
under 아래에 desk+table+bed+chair+tree
behind 뒤에 desk+door+house+tree+bed+school+library+hospital
next|to 옆에 desk+table+bed+door+window+tree+house+computer+box+school+library+hospital
in|front|of 앞에 desk+door+house+tree+window+school+library+hospital
in 안에 box+bag
"""

# Tools of verbs, and means of transport.
TOOLS = {"write": "pencil+pen", "draw": "pencil+pen", "eat": "spoon"}
TRANSPORT_NOUNS = "bus 버스 train 기차 subway 지하철 taxi 택시 bicycle 자전거 car 자동차"

NUMBERS = "one 한 two 두 three 세 four 네 five 다섯 six 여섯 seven 일곱 eight 여덟 nine 아홉 ten 열"
DEGREES = "very 매우 really 정말 too 너무"
FREQUENCIES = "always 항상 often 자주 sometimes 가끔 usually 보통"

# Professions, and relations to other people.
PROFESSIONS = "teacher+doctor+nurse+farmer+singer+writer+painter+scientist+soldier+lawyer"
RELATIONS = "friend+neighbor+teacher+student+doctor"
# Adjectives of temporary feelings.
FEELING_ADJECTIVES = "happy sad tired busy hungry"

# Nouns after *this is*; movable things; people who can be identified.
POINTABLE_NOUNS = "things+plant+fruit+dish+food+drink+animal+furniture+vehicle+house+instrument"
MOVABLE_NOUNS = "book+dictionary+letter+newspaper+tool+sheet+fruit+hat+cat+dog+phone+camera"
IDENTIFIABLE_PEOPLE = "man+woman+neighbor+friend+kin"
